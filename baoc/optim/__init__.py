"""The optimizer that runs an allocation: `BlockwiseOptimizer(params, specs)`."""

from baoc.optim.backward import GradientRelease
from baoc.optim.loading import LoadReport
from baoc.optim.optimizer import BeforeStep, BlockwiseOptimizer

__all__ = ["BeforeStep", "BlockwiseOptimizer", "GradientRelease", "LoadReport"]
