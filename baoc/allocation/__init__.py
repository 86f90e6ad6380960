"""Chooses one spec per block within the limits; sees Candidates only. Every allocator is one entry of ALLOCATORS."""

from baoc.allocation.base import Allocator, NoFeasibleAllocation
from baoc.allocation.exact import ExactAllocator, least_bytes
from baoc.allocation.feasible import possible
from baoc.allocation.greedy import GreedyAllocator
from baoc.allocation.hosted import HOSTED
from baoc.allocation.lagrangian import LagrangianAllocator
from baoc.allocation.random import RandomAllocator
from baoc.allocation.uniform import UNIFORM

ALLOCATORS: dict[str, Allocator] = {
    allocator.name: allocator
    for allocator in (ExactAllocator(), LagrangianAllocator(), GreedyAllocator(), RandomAllocator(), *UNIFORM, *HOSTED)
}

__all__ = ["ALLOCATORS", "Allocator", "NoFeasibleAllocation", "least_bytes", "possible"]
