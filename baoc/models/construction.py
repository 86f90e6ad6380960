"""Makes building a network independent of the caller's default dtype and random state."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def float32_and_seed(seed: int | None) -> Iterator[None]:
    """Inside, the default dtype is float32 and the CPU generator has the `seed`, if given. Restores both."""
    dtype = torch.get_default_dtype()
    random_state = torch.get_rng_state() if seed is not None else None
    torch.set_default_dtype(torch.float32)
    try:
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        yield
    finally:
        torch.set_default_dtype(dtype)
        if random_state is not None:
            torch.set_rng_state(random_state)
