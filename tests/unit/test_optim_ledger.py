"""The ledger: what `cost.state_bytes` promises is what the live tensors take, for every spec and shape."""

import pytest
import torch

from baoc.catalogue import SPECS
from baoc.cost import STEP_BYTES, adamw_state_bytes, state_bytes
from baoc.rules import RULES
from tests.optimizing import (
    SHAPES,
    Gradients,
    build,
    info,
    make_params,
    one_block,
    run_steps,
    shapes_for,
    state_tensors,
)


@pytest.mark.parametrize("spec", SPECS)
def test_predicted_bytes_are_live_bytes(spec: str) -> None:
    shapes = shapes_for(spec)
    params = make_params(shapes)
    optimizer = build(params, spec, lr=1e-2)
    run_steps(optimizer, params, gradients=Gradients(params), steps=2)
    rule = RULES[SPECS[spec].rule].info
    predicted = {b.name: state_bytes(b, spec=SPECS[spec], rule=rule) for b in optimizer.blocks}
    assert optimizer.block_state_bytes() == predicted
    live = sum(tensor.untyped_storage().nbytes() for tensor in state_tensors(optimizer).values())
    assert optimizer.state_bytes() == live == sum(predicted.values())


@pytest.mark.parametrize("spec", SPECS)
def test_a_block_of_many_tensors_pays_for_matching_once(spec: str) -> None:
    shapes = shapes_for(spec)
    params = make_params(shapes)
    block = one_block("all", [info(name, shape) for name, shape in shapes.items()])
    optimizer = build(params, {"all": spec}, blocks=[block])
    assert optimizer.state_bytes() == state_bytes(block, spec=SPECS[spec], rule=RULES[SPECS[spec].rule].info)


def test_fp32_adamw_keeps_what_torch_keeps() -> None:
    params = make_params(SHAPES)
    optimizer = build(params)
    theirs = torch.optim.AdamW(list(params.values()), foreach=False)
    run_steps(theirs, params, gradients=Gradients(params), steps=1)
    kept = sum(t.untyped_storage().nbytes() for state in theirs.state.values() for t in state.values())
    assert kept == adamw_state_bytes(optimizer.blocks)
    assert optimizer.state_bytes() == kept - STEP_BYTES  # torch counts steps of the empty parameter, too


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.filterwarnings("ignore:16-bit weights")
def test_bytes_do_not_depend_on_the_parameters_dtype(dtype: torch.dtype) -> None:
    for spec in ("adamw", "adamw_int8", "lion_bf16"):
        low, high = (build(make_params(SHAPES, dtype=d), spec).state_bytes() for d in (dtype, torch.float32))
        assert low == high


def test_frozen_parameters_have_no_state() -> None:
    params = make_params({"a": (4, 8), "b": (4, 8)})
    params["a"].requires_grad_(False)
    optimizer = build(params)
    assert list(optimizer.specs) == ["b"] and params["a"] not in optimizer.state
    assert optimizer.param_groups[0]["params"] == list(params.values())


def test_on_meta_nothing_is_allocated_and_the_bytes_are_known() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            tensors = {name: torch.empty(shape, dtype=torch.float32) for name, shape in SHAPES.items()}
            optimizer = build({name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}, "adamw_int8")
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.state_bytes() == build(make_params(SHAPES), "adamw_int8").state_bytes()
    on_device = [t for name, t in state_tensors(optimizer).items() if not name.endswith("step")]
    assert all(t.device.type == "meta" for t in on_device)
