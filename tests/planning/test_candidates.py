"""What may run where, what is dominated, and the rows of candidates.csv."""

import pytest

from baoc.core.blocks import partition
from baoc.core.catalogue import NATIVE, SPECS, select
from baoc.core.rule_tags import RULE_INFOS
from baoc.errors import BadInputError
from baoc.planning.candidates import build_candidates, candidate_rows, undominated, why_inapplicable
from baoc.planning.cost import state_bytes
from baoc.planning.limits import charge_savings, savings_by_format
from baoc.planning.risk import RISKS
from baoc.types import Block, Candidate, Cost, Footprint, LatencyTable, OptimizerSpec, ParamInfo, Risk, Role, RuleInfo
from tests.support.decision import param, transformer

BLOCKS = {block.name: block for block in partition(transformer())}
MUON = RuleInfo(name="muon", description="", states=(), needs_matrix=True, hidden_only=True)


def why_not(spec: str, block: str | Block, **options: tuple[Role, ...]) -> str | None:
    row = SPECS[spec]
    where = BLOCKS[block] if isinstance(block, str) else block
    return why_inapplicable(where, spec=row, rule=RULE_INFOS[row.rule], **options)


def test_rules_by_row_and_column_need_matrices():
    assert why_not("adafactor", "layer0.mlp") is None
    assert why_not("adafactor", "norm") == "adafactor needs matrices, norm.weight has shape (64,)"
    for spec in ("adamw", "adamw_int8", "rmsprop", "lion", "sign"):
        assert why_not(spec, "norm") is None


@pytest.mark.parametrize(
    ("shape", "role", "is_stack"),
    [
        ((8, 64, 256), Role.MLP, True),
        ((8, 64, 256), Role.OTHER, True),
        ((64, 64, 3), Role.CONV, False),
        ((64, 1, 3), Role.OTHER, False),
        ((64, 3, 4, 4), Role.OTHER, False),
        ((64, 256), Role.MLP, False),
    ],
)
def test_muon_does_not_step_a_stack_of_matrices_as_one(shape: tuple[int, ...], role: Role, is_stack: bool):
    """It would make 8 experts orthogonal to each other, each taken for a row."""
    block = Block(name="w", params=(ParamInfo(name="w", shape=shape, dtype="float32", role=role),), role=role)
    told = f"muon steps one matrix, w of shape {shape} is a stack, such as of experts"
    assert [why_not(spec, block) for spec in ("muon", "muon_int8")] == ([told] * 2 if is_stack else [None] * 2)
    assert [why_not(spec, block) for spec in ("adamw_int8", "adafactor", "foam_l1", "lion")] == [None] * 4


def test_a_matrix_that_is_stored_the_other_way_is_not_cut_along_the_rows_of_a_rule():
    cut = ParamInfo(name="w", shape=(8, 4), dtype="float32", role=Role.MLP, transposed=True, whole=(8, 4))
    block = Block(name="w", params=(cut,), role=Role.MLP)
    for spec in ("adafactor", "foam_l1", "adamw_shared_in"):
        assert f"w is stored (fan_in, fan_out), so that fully_shard cuts along the rows that {spec}" in str(
            why_not(spec, block)
        )
    assert [why_not(spec, block) for spec in ("adamw", "muon", "lion@streamed")] == [None] * 3


def test_a_fold_must_fit_its_axis():
    narrow = Block(name="b", params=(param("mlp.w", 300, 4),), role=Role.MLP)
    assert why_not("foam_l3", narrow) == "foam_l3 folds 8 neighbours along fan_in, mlp.w has 4"
    assert why_not("foam_l2", narrow) is None


def test_roles_that_are_kept_store_nothing_but_fp32():
    kept = {spec for spec in NATIVE if why_not(spec, "head", keep_fp32_roles=(Role.HEAD,)) is None}
    assert kept == {spec for spec, row in NATIVE.items() if row.storage == "fp32" and why_not(spec, "head") is None}
    assert "head blocks keep fp32 storage" in (why_not("adamw_int8", "head", keep_fp32_roles=(Role.HEAD,)) or "")
    assert "and native weights" in (why_not("adamw+split8", "head", keep_fp32_roles=(Role.HEAD,)) or "")
    assert why_not("adamw_int8", "layer0.mlp", keep_fp32_roles=(Role.HEAD,)) is None


def test_split_weights_are_made_of_fp32_and_bf16():
    double = ParamInfo(name="w", shape=(4, 4), dtype="float64", role=Role.MLP)
    block = Block(name="b", params=(double,), role=Role.MLP)
    assert why_not("sign+split8", block) == "split8 weights are made of float32 or bfloat16, w is float64"
    assert why_not("sign", block) is None


def test_weights_of_16_bits_are_dominated_unless_what_they_save_counts():
    specs = {name: SPECS[name] for name in ("adamw", "adamw+split8")}
    block = BLOCKS["layer0.mlp"]
    options = {"specs": specs, "rules": RULE_INFOS, "risk": RISKS["prior"]}
    assert [c.spec for c in undominated(build_candidates([block], **options))[block.name]] == ["adamw"]
    made = build_candidates([block], **options)
    footprint = Footprint(
        device="cpu",
        micro_batch=1,
        weights_bytes=0,
        gradients_bytes=0,
        forward_backward_bytes=0,
        validation_bytes=0,
        resident_bytes=0,
    )
    saved = savings_by_format([block], specs=specs, count="gradients", footprint=footprint)
    found = charge_savings(made, blocks=[block], specs=specs, saved=saved)
    kept = {c.spec: c.cost for c in undominated(found)[block.name]}
    assert kept["adamw"].weight_bytes == 2 * kept["adamw+split8"].weight_bytes
    assert kept["adamw"].state_bytes < kept["adamw+split8"].state_bytes
    assert kept["adamw+split8"].charged_bytes == kept["adamw+split8"].state_bytes - 4 * block.numel
    assert kept["adamw+split8"].charged_bytes < kept["adamw"].charged_bytes == kept["adamw"].state_bytes


def test_hidden_rules_refuse_embeddings_and_heads():
    spec = OptimizerSpec(name="muon", description="", rule="muon")
    for block, reason in (("embedding", "not for the embedding"), ("head", "not for the head")):
        assert reason in (why_inapplicable(BLOCKS[block], spec=spec, rule=MUON) or "")
    assert why_inapplicable(BLOCKS["layer0.attention"], spec=spec, rule=MUON) is None


def test_candidates_are_complete_exact_and_sorted():
    found = build_candidates(list(BLOCKS.values()), specs=NATIVE, rules=RULE_INFOS, risk=RISKS["prior"])
    assert list(found) == list(BLOCKS)
    for name, options in found.items():
        assert {c.spec for c in options} == {spec for spec in NATIVE if why_not(spec, name) is None}
        held = [c.cost.state_bytes for c in options]
        assert held == sorted(held)
        for c in options:
            assert (c.block, c.role) == (name, BLOCKS[name].role)
            assert c.cost.state_bytes == state_bytes(
                BLOCKS[name], spec=NATIVE[c.spec], rule=RULE_INFOS[NATIVE[c.spec].rule]
            )


def test_risks_are_shares_of_one_network():
    """Cut into tensors or not, the same spec everywhere predicts the same total."""
    totals: list[float] = []
    params = [p for p in transformer() if p.role is Role.MLP]
    for by in ("tensor", "layer_role", "model"):
        blocks = partition([p for p in params if p.depth != 0], by=by)
        found = build_candidates(blocks, specs=select(["sign"]), rules=RULE_INFOS, risk=RISKS["prior"])
        totals.append(sum(c.risk.total for options in found.values() for c in options))
    assert totals == pytest.approx([totals[0]] * 3)


def test_an_empty_parameter_still_prefers_adamw():
    empty = Block(name="empty", params=(param("gone.weight", 0, 4),), role=Role.OTHER)
    found = build_candidates([empty, *BLOCKS.values()], specs=NATIVE, rules=RULE_INFOS, risk=RISKS["prior"])["empty"]
    assert min(found, key=lambda c: c.risk.total).spec == "adamw"
    assert {c.spec for c in found} >= {"adamw", "adamw_int8", "sign"}


def test_a_block_on_which_nothing_may_run_is_named_with_reasons():
    with pytest.raises(BadInputError, match=r"no .* spec may run on block 'layer0.norm' \(adafactor: adafactor needs"):
        build_candidates(list(BLOCKS.values()), specs=select(["adafactor"]), rules=RULE_INFOS, risk=RISKS["prior"])


def test_latency_gives_seconds():
    latency = LatencyTable(device="cpu", fixed_s=dict.fromkeys(NATIVE, 1e-6), per_element_s=dict.fromkeys(NATIVE, 1e-9))
    blocks = list(BLOCKS.values())
    found = build_candidates(blocks, specs=select(["adamw"]), rules=RULE_INFOS, risk=RISKS["prior"], latency=latency)
    assert found["head"][0].cost.step_s == pytest.approx(1e-6 + 6400e-9)


def made(spec: str, held: int, risk: float, *, step_s: float = 0.0, transfer: int = 0) -> Candidate:
    cost = Cost(state_bytes=held, step_s=step_s, streamed_bytes=transfer)
    return Candidate(block="b", spec=spec, cost=cost, risk=Risk(total=risk, terms={"x": risk}))


def kept(*options: Candidate, with_time: bool = True) -> list[str]:
    return [c.spec for c in undominated({"b": options}, with_time=with_time)["b"]]


def test_dominated_candidates_are_dropped():
    assert kept(made("dear", 8, 0.0), made("worse", 4, 0.3), made("cheap", 2, 0.2)) == ["cheap", "dear"]
    assert kept(made("first", 4, 0.1), made("equal", 4, 0.1)) == ["first"], "of equals the first stays"
    assert kept(made("fast", 4, 0.1, step_s=1.0), made("slow", 4, 0.0, step_s=2.0)) == ["slow", "fast"]
    assert kept(made("fast", 4, 0.1, step_s=1.0), made("slow", 4, 0.0, step_s=2.0), with_time=False) == ["slow"]
    assert kept(made("host", 4, 0.1, transfer=9), made("device", 5, 0.1)) == ["host", "device"]


def test_rows_flag_what_is_dominated_and_spread_the_terms():
    rows = candidate_rows({"b": (made("cheap", 2, 0.2), made("worse", 4, 0.3), made("dear", 8, 0.0))})
    assert [(row["spec"], row["dominated"]) for row in rows] == [("cheap", False), ("worse", True), ("dear", False)]
    assert rows[0]["risk/x"] == 0.2
    assert rows[0]["role"] == "other"
    assert len({tuple(row) for row in rows}) == 1, "every row has the same columns"
