"""Who steps a bucket (all blocks of one spec): eager torch for every spec; fused kernels register here beside it."""

from collections.abc import Callable

from baoc.optim.backends.eager import StepInputs, step_bucket
from baoc.optim.state import Bucket

__all__ = ["BACKENDS", "Backend", "StepInputs", "backend_for"]

Backend = Callable[[Bucket, StepInputs], None]

BACKENDS: dict[str, Backend] = {"eager": step_bucket}


def backend_for(bucket: Bucket, *, name: str) -> Backend:
    """The backend for a bucket: `auto` takes the fastest that is proven equal to the eager one, today the eager one."""
    return BACKENDS["eager" if name == "auto" else name]
