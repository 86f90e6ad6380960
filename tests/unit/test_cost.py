"""The ledger by hand for one row of each kind; the optimizer's tests hold every row to live tensors."""

import pytest

from baoc.catalogue import SPECS
from baoc.cost import adamw_state_bytes, cost, state_bytes
from baoc.types import Block, LatencyTable, OptimizerSpec, ParamInfo, Role
from tests.decision import RULES, param

MATRIX = Block(name="mlp", params=(param("mlp.fc1.weight", 10, 40),), role=Role.MLP)
PAIR = Block(name="two", params=(param("mlp.fc1.weight", 10, 40), param("mlp.fc1.bias", 10)), role=Role.MLP)


def held(spec: str, block: Block = MATRIX) -> int:
    return state_bytes(block, spec=SPECS[spec], rule=RULES[SPECS[spec].rule])


@pytest.mark.parametrize(
    ("spec", "nbytes"),
    [
        ("adamw", 2 * 400 * 4 + 4),  # its update RMS is nobody's to match: no 8 bytes per block
        ("adamw_bf16", 2 * 400 * 2 + 4),
        ("adamw_int8", 2 * (400 + 13 * 2) + 4),
        ("rmsprop", 400 * 4 + 4 + 8),
        ("adamw_shared_in_int8", 400 + 13 * 2 + 10 * 4 + 4 + 8),  # one v per row, never quantised
        ("adamw_shared_out", 400 * 4 + 40 * 4 + 4 + 8),
        ("adafactor", (10 + 40) * 4 + 4 + 8),
        ("lion_bf16", 400 * 2 + 8),  # counts no steps
        ("foam_l3", 2 * (10 * 5) * 4 + 4 + 8),
        ("foam_l3_out", 2 * (2 * 40) * 4 + 4 + 8),  # 10 rows are two folds of 8
        ("foam_l2_int8", 2 * (100 + 4 * 2) + 4 + 8),
        ("sign", 8),
    ],
)
def test_state_bytes(spec: str, nbytes: int):
    assert held(spec) == nbytes


def test_steps_are_counted_per_tensor_and_matching_per_block():
    assert held("rmsprop", PAIR) == (400 + 10) * 4 + 2 * 4 + 8


def test_a_transposed_parameter_is_seen_as_rules_see_it():
    stored = ParamInfo(name="c_fc.weight", shape=(10, 40), dtype="float32", role=Role.MLP, transposed=True)
    block = Block(name="b", params=(stored,), role=Role.MLP)
    assert held("adamw_shared_in", block) == held("adamw_shared_out", MATRIX)


def test_adamw_state_bytes_is_torch_s():
    assert adamw_state_bytes([MATRIX, PAIR]) == 8 * (400 + 410) + 3 * 4


def test_cost_joins_bytes_traffic_and_seconds():
    host = OptimizerSpec(name="adamw", description="", rule="adamw", placement="host")
    latency = LatencyTable(device="cpu", fixed_s={"adamw": 1e-5}, per_element_s={"adamw": 1e-9})
    made = cost(MATRIX, spec=host, rule=RULES["adamw"], latency=latency)
    assert (made.state_bytes, made.transfer_bytes) == (3204, 6408)
    assert made.step_s == pytest.approx(1e-5 + 400e-9)
    assert cost(MATRIX, spec=SPECS["adamw"], rule=RULES["adamw"]).step_s == 0.0


def test_a_spec_that_was_not_timed_is_no_zero():
    latency = LatencyTable(device="cpu", fixed_s={"adamw": 1e-5}, per_element_s={"adamw": 1e-9})
    with pytest.raises(AssertionError, match="sign was not timed"):
        cost(MATRIX, spec=SPECS["sign"], rule=RULES["sign"], latency=latency)


def test_a_spec_is_only_priced_with_its_own_rule():
    with pytest.raises(AssertionError, match="spec adamw runs adamw, not sign"):
        state_bytes(MATRIX, spec=SPECS["adamw"], rule=RULES["sign"])
