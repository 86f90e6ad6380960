"""The optimizer that runs an allocation: `BlockwiseOptimizer(params, specs)`."""

from baoc.optim.backward import BeforeStep, GradientRelease
from baoc.optim.loading import LoadReport
from baoc.optim.optimizer import BlockwiseOptimizer

__all__ = ["BeforeStep", "BlockwiseOptimizer", "GradientRelease", "LoadReport"]
