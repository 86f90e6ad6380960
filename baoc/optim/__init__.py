"""The optimizer that runs an allocation: `BlockwiseOptimizer(params, specs)`."""

from baoc.optim.loading import LoadReport
from baoc.optim.optimizer import BlockwiseOptimizer
from baoc.optim.release_settings import GradientRelease

__all__ = ["BlockwiseOptimizer", "GradientRelease", "LoadReport"]
