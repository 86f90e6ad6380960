"""Allocators: they choose one candidate spec for each block, of least total risk within the limits.

This is a multiple-choice knapsack problem with up to four limits: bytes and seconds of the device, bytes of the host,
seconds of the link. An allocator sees only candidates and limits. ALLOCATORS has them by name.
"""

from baoc.planning.allocators.base import Allocator, NoFeasibleAllocation
from baoc.planning.allocators.exact import EXACT
from baoc.planning.allocators.feasible import possible
from baoc.planning.allocators.lagrangian import LAGRANGIAN
from baoc.planning.allocators.program import least_bytes
from baoc.planning.allocators.random import RandomAllocator
from baoc.planning.allocators.recipe import RecipeAllocator
from baoc.planning.allocators.uniform import UNIFORM

ALLOCATORS: dict[str, Allocator] = {
    allocator.name: allocator for allocator in (EXACT, LAGRANGIAN, RandomAllocator(), RecipeAllocator(), *UNIFORM)
}

__all__ = ["ALLOCATORS", "Allocator", "NoFeasibleAllocation", "least_bytes", "possible"]
