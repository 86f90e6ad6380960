"""The ledger by hand for one row of each kind; the optimizer's tests hold every row to live tensors."""

import math

import pytest

from baoc.core.catalogue import SPECS, device_spec_name
from baoc.core.rule_tags import RULE_INFOS
from baoc.planning.cost import (
    adamw_state_bytes,
    bytes_per_parameter,
    cost,
    grouped_bytes,
    native_bytes,
    param_state_bytes,
    state_bytes,
    step_seconds,
    weight_bytes,
    whole_step_seconds,
)
from baoc.planning.transfer import STORED_RATES, copy_seconds
from baoc.types import Block, LatencyTable, ParamInfo, Role
from tests.support.decision import param

MATRIX = Block(name="mlp", params=(param("mlp.fc1.weight", 10, 40),), role=Role.MLP)
PAIR = Block(name="two", params=(param("mlp.fc1.weight", 10, 40), param("mlp.fc1.bias", 10)), role=Role.MLP)


def held(spec: str, block: Block = MATRIX) -> int:
    return state_bytes(block, spec=SPECS[spec], rule=RULE_INFOS[SPECS[spec].rule])


@pytest.mark.parametrize(
    ("spec", "nbytes"),
    [
        ("adamw", 2 * 400 * 4 + 4),  # its update RMS is nobody's to match: no 8 bytes per block
        ("adamw_bf16", 2 * 400 * 2 + 4),
        ("adamw_int8", 2 * (400 + 32) + 4),  # 13 scales of 2 bytes, up to the next multiple of 16
        ("rmsprop", 400 * 4 + 4 + 8),
        ("adamw_shared_in_int8", 400 + 32 + 48 + 4),  # one v per row, never quantised
        ("adamw_shared_out", 400 * 4 + 40 * 4 + 4),
        ("adafactor", 48 + 160 + 4 + 8),
        ("lion_bf16", 400 * 2 + 8),  # counts no steps
        ("foam_l3", 2 * 208 + 4 + 8),  # 10 x 5 numbers
        ("foam_l2_int8", 2 * (112 + 16) + 4 + 8),  # 100 codes and 4 scales
        ("sign", 8),
        ("column_norm", 8),
        ("muon", 400 * 4 + 8),
        ("adamw_int8_root", 2 * (400 + 32) + 4),
        ("lion_int4", 400 * 4 + 8),  # fewer than 4096 numbers stay fp32
        ("sign+split8", 400 + 8),
        ("lion_int8+split8", 400 + 32 + 400 + 8),
        ("adamw+bf16_sr", 2 * 400 * 4 + 4),  # no correction
    ],
)
def test_state_bytes(spec: str, nbytes: int):
    assert held(spec) == nbytes


@pytest.mark.parametrize(
    ("shape", "nbytes"),
    [
        ((63, 65), 2 * 4096 * 4),  # 4095 numbers in fp32, up to the next multiple of 16
        ((64, 64), 2 * (2048 + 128)),  # two codes a byte, 64 scales of 2 bytes
        ((97, 103), 2 * (4996 + 12 + 314 + 6)),  # 9991: the last byte is half empty, the last group short
    ],
)
def test_4_bits_are_for_tensors_that_are_worth_it(shape: tuple[int, ...], nbytes: int):
    block = Block(name="b", params=(param("mlp.fc1.weight", *shape),), role=Role.MLP)
    assert held("adamw_int4", block) == nbytes + 4


def test_steps_are_counted_per_tensor_and_matching_per_block():
    assert held("rmsprop", PAIR) == (400 * 4 + 48) + 2 * 4 + 8


def test_a_transposed_parameter_is_seen_as_rules_see_it():
    stored = ParamInfo(name="c_fc.weight", shape=(10, 40), dtype="float32", role=Role.MLP, transposed=True)
    block = Block(name="b", params=(stored,), role=Role.MLP)
    assert held("adamw_shared_in", block) == held("adamw_shared_out", MATRIX)


def test_the_unit_of_state_fractions_is_the_ledger_of_fp32_adamw():
    """Two moments of 10 numbers take 48 bytes each where they lie in a slab."""
    assert adamw_state_bytes([MATRIX, PAIR]) == 8 * (400 + 400) + 2 * 48 + 3 * 4
    assert adamw_state_bytes([MATRIX, PAIR]) == held("adamw", MATRIX) + held("adamw", PAIR)


def test_cost_joins_bytes_and_seconds():
    latency = LatencyTable(device="cpu", fixed_s={"adamw": 1e-5}, per_element_s={"adamw": 1e-9})
    made = cost(MATRIX, spec=SPECS["adamw"], rule=RULE_INFOS["adamw"], latency=latency)
    assert (made.state_bytes, made.host_bytes, made.transfer_bytes) == (3204, 0, 0)
    assert made.step_s == pytest.approx(1e-5 + 400e-9)
    assert cost(MATRIX, spec=SPECS["adamw"], rule=RULE_INFOS["adamw"]).step_s == 0.0


def test_streamed_states_leave_only_matching_on_the_device():
    """400 elements: m and v of 1 byte with 13 scales of 2 bytes each, a correction of 1 byte; a step count stays."""
    slab = 2 * (400 + 32) + 400
    latency = LatencyTable(device="cpu", fixed_s={"rmsprop": 1e-5}, per_element_s={"rmsprop": 1e-9})
    spec = SPECS["adamw_int8+split8@streamed"]
    made = cost(MATRIX, spec=spec, rule=RULE_INFOS["adamw"])
    assert (made.state_bytes, made.host_bytes, made.charged_bytes, made.weight_bytes) == (0, slab + 4, 0, 800)
    assert (made.streamed_bytes, made.transfer_bytes) == (slab, 2 * slab)
    assert made.link_s == copy_seconds(slab, link=STORED_RATES) > 0
    matched = cost(MATRIX, spec=SPECS["rmsprop@streamed"], rule=RULE_INFOS["rmsprop"], latency=latency)
    assert (matched.state_bytes, matched.host_bytes) == (8, 1600 + 4)
    assert matched.step_s == pytest.approx(1e-5 + 400e-9), "the kernel is the one that steps it on the device"


@pytest.mark.parametrize("spec", ["adamw@streamed", "lion_int8@streamed", "sign+split8@streamed"])
def test_where_the_device_is_the_host_its_bytes_are_charged(spec: str):
    row = SPECS[spec]
    rule = RULE_INFOS[row.rule]
    everything = state_bytes(MATRIX, spec=row, rule=rule)
    placed, shared = (cost(MATRIX, spec=row, rule=rule, shared=shared) for shared in (False, True))
    assert placed.state_bytes + placed.host_bytes == everything
    assert (placed.charged_bytes, shared.charged_bytes) == (placed.state_bytes, everything)
    assert everything == cost(MATRIX, spec=SPECS[device_spec_name(spec)], rule=rule).charged_bytes


def test_a_spec_that_was_not_timed_is_no_zero():
    latency = LatencyTable(device="cpu", fixed_s={"adamw": 1e-5}, per_element_s={"adamw": 1e-9})
    with pytest.raises(AssertionError, match="sign was not timed"):
        cost(MATRIX, spec=SPECS["sign"], rule=RULE_INFOS["sign"], latency=latency)


def test_a_whole_step_is_its_base_and_each_block_by_its_own_spec():
    seconds = {"adamw": 1e-5, "sign": 1e-6}
    latency = LatencyTable(
        device="cpu", fixed_s=seconds, per_element_s={"adamw": 1e-9, "sign": 1e-10}, base_step_s=2.0, step_s=0.5
    )
    given = {"blocks": (MATRIX, PAIR), "specs": SPECS, "latency": latency}
    assert step_seconds(PAIR, spec=SPECS["adamw"], latency=latency) == pytest.approx(2e-5 + 410e-9)
    found = whole_step_seconds({"mlp": "sign", "two": "adamw@streamed"}, **given)
    assert found == pytest.approx(2.5 + 1e-6 + 400e-10 + 2e-5 + 410e-9, rel=1e-12)
    assert math.isnan(whole_step_seconds({"mlp": "sign", "two": "lion"}, **given))
    with pytest.raises(AssertionError, match=r"^lion was not timed; the table has adamw, sign$"):
        step_seconds(PAIR, spec=SPECS["lion"], latency=latency)


def test_nothing_is_kept_of_a_parameter_without_elements():
    empty = param("mlp.fc1.weight", 0, 4)
    assert param_state_bytes(empty, spec=SPECS["adamw"], rule=RULE_INFOS["adamw"]) == 0
    unknown = ParamInfo(name="w", shape=(2, 4), dtype="float8_e4m3fn", role=Role.MLP)
    assert native_bytes(unknown) == 32, "as fp32, which is not too little"


def test_a_spec_is_only_priced_with_its_own_rule():
    with pytest.raises(AssertionError, match="spec adamw runs adamw, not sign"):
        state_bytes(MATRIX, spec=SPECS["adamw"], rule=RULE_INFOS["sign"])


@pytest.mark.parametrize(
    ("spec", "dtype", "nbytes"),
    [("adamw", "float32", 4), ("adamw", "bfloat16", 2), ("adamw+split8", "float32", 2), ("sign+bf16", "bfloat16", 2)],
)
def test_weights_are_priced_apart_from_states(spec: str, dtype: str, nbytes: int):
    stored = ParamInfo(name="w", shape=(10, 40), dtype=dtype, role=Role.MLP)
    block = Block(name="b", params=(stored,), role=Role.MLP)
    assert weight_bytes(block, spec=SPECS[spec]) == 400 * nbytes
    assert cost(block, spec=SPECS[spec], rule=RULE_INFOS[SPECS[spec].rule]).weight_bytes == 400 * nbytes


@pytest.mark.parametrize(
    ("spec", "state", "weights"),
    [("adamw", 8, 4), ("sign", 0, 4), ("adamw_int8", 2 + 2 * 2 / 32, 4), ("muon_int8+bf16_sr", 1 + 2 / 32, 2)],
)
def test_bytes_per_parameter_of_a_large_matrix(spec: str, state: float, weights: float):
    """Of 8 bits, a 16-bit scale for every 32 elements comes on top; the step count of a tensor does not show."""
    found = bytes_per_parameter(SPECS[spec], rule=RULE_INFOS[SPECS[spec].rule])
    assert found == pytest.approx((state, weights), rel=1e-4, abs=1e-6)


def test_released_gradients_wait_up_to_a_sixteenth_of_all_and_128_mib():
    assert grouped_bytes(1600) == 100 and grouped_bytes(1615) == 100
    assert grouped_bytes(16 * 2**27 - 16) == 2**27 - 1
    assert grouped_bytes(2**40) == 2**27
