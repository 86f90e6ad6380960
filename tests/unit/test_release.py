"""Gradient release: the step that was taken in backward is the step, bit for bit, and what cannot be is refused."""

import pytest
import torch
from torch import Tensor, nn

from baoc.catalogue import NATIVE
from tests.optimizing import MATRICES, one_block, info, shapes_for
from tests.releasing import Pair

WEIGHTS = ("adamw+split8", "adamw_int8+split8", "adamw+split16", "lion_int8+split16", "foam_l2+split8",
           "adamw_bf16+bf16_sr", "sign+bf16_sr", "rmsprop+bf16", "adafactor+split8")  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:16-bit weights without correction")


@pytest.mark.parametrize("spec", [*NATIVE, *WEIGHTS])
def test_a_released_step_is_the_step_bit_for_bit(spec: str) -> None:
    pair = Pair(spec, shapes_for(spec.partition("+")[0]), backend="eager", lr=1e-2)
    before = {name: param.detach().clone() for name, param in pair.twins.items()}
    for _ in range(4):
        pair.step()
        assert all(param.grad is None for param in pair.twins.values())
    pair.check()
    assert not any(torch.equal(before[n].to(p.dtype), p) for n, p in pair.twins.items() if p.numel())
