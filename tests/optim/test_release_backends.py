"""Blocks stepped one by one in backward, natively and fused, against the same backend stepping all of them at once."""

from contextlib import nullcontext

import pytest
import torch

from baoc.core.catalogue import NATIVE
from baoc.optim.backends.native import native_refusal
from tests.support.fused_pair import SHAPES
from tests.support.interpreting import interpreted
from tests.support.optimizing import Gradients, build, info, make_params, one_block, shapes_for
from tests.support.releasing import Pair, backward

STEPPED = [name for name, spec in NATIVE.items() if not native_refusal(spec)][::2]
WEIGHTS = ("adamw_int8+split8", "lion+split8", "adamw_bf16+bf16_sr")
FUSED = ("adamw_int4", "rmsprop", "foam_l2_int8", "adafactor")
BLOCKS = [
    one_block("first", [info("a", SHAPES["a"]), info("b", SHAPES["b"]), info("empty", SHAPES["empty"])]),
    one_block("second", [info("c", SHAPES["c"]), info("d", SHAPES["d"])]),
    one_block("third", [info("one", SHAPES["one"])]),
]


@pytest.mark.parametrize("spec", [*STEPPED, *WEIGHTS])
def test_native_steps_block_by_block_are_the_native_step(spec: str) -> None:
    pair = Pair(spec, shapes_for(spec.partition("+")[0]), backend="native", lr=1e-2)
    for _ in range(3):
        pair.step()
    assert {choice.backend for choice in pair.released.registry.choices.values()} == {"native"}
    assert not any(optimizer.num_nonfinite for optimizer in (pair.kept, pair.released))
    pair.check()


MIXED = {"first": "adamw_int8", "second": "lion_int8+split8", "third": "sign"}


@interpreted
@pytest.mark.parametrize("spec", [*FUSED, *WEIGHTS[:1], MIXED])
def test_fused_steps_block_by_block_are_the_fused_step(spec: object) -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if spec is MIXED or len(shape) > 1}
    blocks = BLOCKS if spec is MIXED else None
    pair = Pair(spec, shapes, backend="fused", lr=1e-2, blocks=blocks)
    for _ in range(3):
        pair.step()
    assert {choice.backend for choice in pair.released.registry.choices.values()} == {"fused"}
    pair.check()


@interpreted
def test_what_kernels_leave_out_is_left_out_and_counted_by_block() -> None:
    pair = Pair({"first": "adamw_int8", "second": "lion", "third": "sign"}, SHAPES, backend="fused", blocks=BLOCKS)
    pair.step()
    grads = pair.gradients.next()
    grads["a"][2, 3] = float("nan")
    grads["d"][0, 1, 2] = float("inf")
    pair.step(grads)
    assert pair.released.num_nonfinite == pair.kept.num_nonfinite == 2
    assert pair.released.last_nonfinite == pair.kept.last_nonfinite == {"a": 1, "d": 1}
    pair.step()
    pair.check()


@interpreted
@pytest.mark.parametrize("spec", ["adamw", "adamw@streamed"])
@pytest.mark.parametrize("needed", ["a", "scale"])
def test_a_backward_that_still_needs_the_old_weights_is_told(needed: str, spec: str) -> None:
    """Kernels write past autograd, which would else compute gradients with the new weights and say nothing."""
    shapes = {"a": (4, 4), "scale": (4,)}
    params = make_params(shapes)
    blocks = [one_block("both", [info(name, shape) for name, shape in shapes.items()])]
    optimizer = build(params, spec, blocks=blocks, backend="fused", release="@" not in spec)
    x = torch.ones(4, 4, requires_grad=True)
    early = (x * params[needed].detach()).sum()
    with optimizer.last_backward() if "@" in spec else nullcontext():
        backward(params, Gradients(params).next())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        early.backward()
