"""The ledger: what `cost.state_bytes` promises is what the live tensors take, for every spec and shape."""

import itertools

import pytest
import torch

from baoc.core.catalogue import NATIVE, SPECS
from baoc.optim.rules import RULES
from baoc.planning.cost import STEP_BYTES, adamw_state_bytes, state_bytes, weight_bytes
from tests.support.optimizing import (
    SHAPES,
    Gradients,
    build,
    info,
    make_params,
    one_block,
    run_steps,
    shapes_for,
    state_tensors,
    trained,
)


@pytest.mark.parametrize("spec", NATIVE)
def test_predicted_bytes_are_live_bytes(spec: str) -> None:
    shapes = shapes_for(spec)
    _, optimizer, _ = trained(shapes, spec, lr=1e-2, steps=2)
    rule = RULES[NATIVE[spec].rule].info
    predicted = {b.name: state_bytes(b, spec=NATIVE[spec], rule=rule) for b in optimizer.blocks}
    assert optimizer.block_state_bytes() == predicted
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in state_tensors(optimizer).values()}
    live = sum(storage.nbytes() for storage in storages.values())
    assert optimizer.state_bytes() == live == sum(predicted.values())


@pytest.mark.parametrize("spec", NATIVE)
def test_a_block_of_many_tensors_pays_for_matching_once(spec: str) -> None:
    shapes = shapes_for(spec)
    params = make_params(shapes)
    block = one_block("all", [info(name, shape) for name, shape in shapes.items()])
    optimizer = build(params, {"all": spec}, blocks=[block])
    assert optimizer.state_bytes() == state_bytes(block, spec=NATIVE[spec], rule=RULES[NATIVE[spec].rule].info)


def test_fp32_adamw_keeps_what_torch_keeps() -> None:
    params = make_params(SHAPES)
    optimizer = build(params)
    theirs = torch.optim.AdamW(list(params.values()), foreach=False)
    run_steps(theirs, params, gradients=Gradients(params), steps=1)
    kept = sum(t.untyped_storage().nbytes() for state in theirs.state.values() for t in state.values())
    assert optimizer.state_bytes() == adamw_state_bytes(optimizer.blocks)
    padding = 2 * sum(-4 * param.numel() % 16 for param in params.values())
    assert optimizer.state_bytes() == kept + padding - STEP_BYTES  # torch counts steps of the empty parameter, too


@pytest.mark.parametrize("spec", ["adamw_int8+split8", "lion+split8", "sign+split8", "foam_l2_int8+bf16_sr"])
def test_corrections_are_in_the_ledger(spec: str) -> None:
    params, optimizer, _ = trained(shapes_for(spec), spec, lr=1e-2, steps=2)
    rule = RULES[SPECS[spec].rule].info
    predicted = {b.name: state_bytes(b, spec=SPECS[spec], rule=rule) for b in optimizer.blocks}
    assert optimizer.block_state_bytes() == predicted
    held = sum(weight_bytes(block, spec=SPECS[spec]) for block in optimizer.blocks)
    assert held == sum(param.nbytes for param in params.values())


def test_states_of_a_block_lie_in_one_aligned_allocation() -> None:
    shapes = {"linear": (17, 64), "odd": (9, 37), "v257": (257,)}
    params = make_params(shapes)
    params["turned"] = torch.nn.Parameter(torch.randn(6, 40).t())
    block = one_block("all", [info(name, tuple(param.shape)) for name, param in params.items()])
    optimizer = build(params, {"all": "adamw_int8+split8"}, blocks=[block])
    states = [t for name, t in state_tensors(optimizer).items() if not name.endswith(("step", "match"))]
    assert len({t.untyped_storage()._cdata for t in states}) == 1
    assert all(t.data_ptr() % 16 == 0 for t in states)
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in states)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans)), "states must not overlap"
    optimizer.migrate({"all": "adamw"})
    assert optimizer.state[params["turned"]]["m"].stride() == params["turned"].stride() == (1, 40)


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
