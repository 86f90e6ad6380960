"""Risk models: what is given up is read off the tags, AdamW costs nothing, statistics replace priors term by term."""

from collections.abc import Mapping

import pytest

from baoc.core.blocks import partition
from baoc.core.catalogue import NATIVE, STORAGES
from baoc.core.rule_tags import RULE_INFOS
from baoc.planning.risk import RISKS, SEVERITY, block_weight, cuts, quantization_dose
from baoc.types import Block, Profile, Risk, Role
from tests.support.decision import stats, transformer

BLOCKS = {block.name: block for block in partition(transformer())}
NAN = float("nan")


def risk(
    spec: str,
    block: str = "layer1.mlp",
    *,
    model: str = "prior",
    profile: Profile | None = None,
    weights: Mapping[str, float] | None = None,
    share: float = 1.0,
) -> Risk:
    row = NATIVE[spec]
    return RISKS[model](
        block=BLOCKS[block],
        spec=row,
        rule=RULE_INFOS[row.rule],
        storage=STORAGES[row.storage],
        profile=profile,
        weights=weights or {},
        share=share,
    )


def profiled(**changes: float | Mapping[str, float]) -> Profile:
    return Profile(stats={"layer1.mlp": stats(**changes)})


@pytest.mark.parametrize(
    ("spec", "terms"),
    [
        ("adamw", set[str]()),
        ("adamw_bf16", {"quantize_m", "quantize_v"}),
        ("rmsprop_int8", {"drop_m", "quantize_v"}),
        ("adamw_shared_in_int8", {"share_v", "quantize_m"}),  # a v per row stays fp32
        ("adafactor", {"drop_m", "factor_v"}),
        ("adafactor_momentum", {"factor_v"}),
        ("lion_bf16", {"drop_v", "quantize_m"}),
        ("foam_l2_int8", {"fold_m", "fold_v", "quantize_m", "quantize_v"}),
        ("foam_l2", {"fold_m", "fold_v"}),
        ("muon_bf16", {"spectral_v", "quantize_m"}),
        ("sign", {"drop_m", "drop_v"}),
        ("column_norm", {"drop_m", "column_v"}),
    ],
)
def test_terms_are_what_the_tags_say_is_given_up(spec: str, terms: set[str]):
    row = NATIVE[spec]
    assert {cut.term for cut in cuts(RULE_INFOS[row.rule], storage=STORAGES[row.storage])} == terms
    for model in RISKS:
        found = risk(spec, model=model, profile=profiled())
        assert set(found.terms) == terms
        assert found.total == pytest.approx(sum(found.terms.values()))


@pytest.mark.parametrize("model", RISKS)
@pytest.mark.parametrize("block", BLOCKS)
def test_adamw_in_fp32_risks_exactly_nothing_and_all_else_something(model: str, block: str):
    profile = Profile(stats={name: stats() for name in BLOCKS})
    for spec in NATIVE:
        total = risk(spec, block, model=model, profile=profile).total
        small = block.endswith("norm") and spec == "adamw_int4"  # fewer numbers than are worth coding: it is AdamW
        assert total == 0.0 if spec == "adamw" or small else total > 0.0


def test_the_prior_gives_up_safe_things_first():
    ranked = ("adamw_bf16", "adamw_int8", "adafactor_momentum", "rmsprop", "foam_l1", "foam_l2", "foam_l3", "sign")
    totals = [risk(spec).total for spec in ranked]
    assert totals == sorted(totals)
    assert len(set(totals)) == len(totals)
    assert risk("adamw_int8").total < min(risk(s).total for s in ("rmsprop", "adamw_shared_in", "adamw_shared_out"))
    worst = max(NATIVE, key=lambda spec: risk(spec).total)
    assert worst == "sign"


def test_the_prior_s_roles():
    def of(block: str, spec: str = "adamw_shared_in") -> float:
        return risk(spec, block).total

    assert of("head", "sign") > of("embedding", "sign") > of("layer1.attention", "sign") > of("layer1.mlp", "sign")
    assert of("norm", "rmsprop") > of("layer1.mlp", "rmsprop")
    assert of("layer0.mlp") == pytest.approx(1.5 * of("layer1.mlp")), "the first layer"
    assert of("layer1.mlp") > of("layer1.mlp", "adamw_shared_out"), "fan-out suits the mlp"
    assert of("embedding") < of("embedding", "adamw_shared_out"), "fan-in suits embeddings"


def test_risk_grows_with_the_share_of_the_parameters_and_does_not_depend_on_how_they_are_cut():
    assert risk("sign", share=0.6).total == pytest.approx(2 * risk("sign", share=0.3).total)


def test_weights_multiply_terms_by_name():
    plain, weighted = risk("sign"), risk("sign", weights={"drop_m": 3.0, "fold_m": 9.0})
    assert weighted.terms["drop_m"] == pytest.approx(3 * plain.terms["drop_m"])
    assert weighted.terms["drop_v"] == plain.terms["drop_v"]
    assert risk("sign", weights={"drop_m": 0.0, "drop_v": 0.0}).total == 0.0


@pytest.mark.parametrize(
    ("spec", "changes", "more"),
    [
        ("rmsprop", {"noise": 0.1}, {"noise": 10.0}),
        ("rmsprop", {"coherence": 0.9}, {"coherence": 0.1}),
        ("lion", {"anisotropy": 0.5}, {"anisotropy": 2.0}),
        ("adamw_shared_in", {"snr_fan_in": 4.0}, {"snr_fan_in": 0.5}),
        ("adamw_shared_out", {"snr_fan_out": 4.0}, {"snr_fan_out": 0.5}),
        ("adafactor", {"factor_residual": 0.1}, {"factor_residual": 0.6}),
        ("adamw_int8", {"spread": 0.5}, {"spread": 1.5}),
        ("adamw_int4", {"spread": 0.5}, {"spread": 1.5}),
        ("column_norm", {"snr_fan_out": 4.0}, {"snr_fan_out": 0.5}),
        ("foam_l2", {"fold_residual": {"fan_in:2": 0.2}}, {"fold_residual": {"fan_in:2": 0.7}}),
    ],
)
def test_statistics_move_their_own_term(spec: str, changes: Mapping[str, float], more: Mapping[str, float]):
    low, high = (risk(spec, model="statistics", profile=profiled(**c)).total for c in (changes, more))
    assert low < high


def test_a_statistic_of_the_other_axis_plays_no_part():
    base = risk("adamw_shared_in", model="statistics", profile=profiled()).total
    assert risk("adamw_shared_in", model="statistics", profile=profiled(snr_fan_out=0.01)).total == base


def test_statistics_by_hand():
    found = risk("adafactor", model="statistics", profile=profiled(noise=3.0, coherence=0.25, factor_residual=0.4))
    weight = 0.1  # descent_share
    assert found.terms["drop_m"] == pytest.approx(weight * SEVERITY["drop_m"] * 0.75)
    assert found.terms["factor_v"] == pytest.approx(weight * SEVERITY["factor_v"] * 0.4)


@pytest.mark.parametrize("noise", [float("inf"), -2.0])
def test_a_signal_that_came_out_at_nothing_is_all_noise(noise: float):
    found = risk("rmsprop", model="statistics", profile=profiled(noise=noise, coherence=0.0, descent_share=1.0))
    assert found.terms["drop_m"] == pytest.approx(SEVERITY["drop_m"])


def test_a_statistic_that_is_not_known_leaves_its_term_to_the_prior():
    profile = profiled(factor_residual=NAN, descent_share=NAN)
    prior, found = risk("adafactor", share=0.3), risk("adafactor", model="statistics", profile=profile, share=0.3)
    assert found.terms["factor_v"] == prior.terms["factor_v"]
    assert found.terms["drop_m"] != prior.terms["drop_m"]
    unseen = risk("adafactor", "layer2.mlp", model="statistics", profile=profile, share=0.3)
    assert unseen == risk("adafactor", "layer2.mlp", share=0.3)
    assert risk("foam_l2", model="statistics", profile=profiled(fold_residual={}, descent_share=1.0)) == risk("foam_l2")


def test_a_block_weighs_its_share_of_the_descent_and_is_never_free():
    assert block_weight(stats(descent_share=0.4), share=0.2) == 0.4
    assert block_weight(stats(descent_share=-0.4), share=0.2) == pytest.approx(0.02)
    assert block_weight(stats(descent_share=NAN), share=0.2) == block_weight(None, share=0.2) == 0.2


def test_quantization_dose_follows_the_measured_points():
    assert quantization_dose("sqrt8", spread=1.0) == 1.0
    assert quantization_dose("sqrt8", spread=1.25) == pytest.approx((0.037 + 0.206) / 2 / 0.037)
    assert quantization_dose("sqrt8", spread=9.0) == pytest.approx(0.39 / 0.037)
    for spread in (0.5, 1.0, 1.5):
        assert quantization_dose("root8v", spread=spread) <= quantization_dose("sqrt8", spread=spread)
    for spread in (0.0, 0.5, 2.0):
        assert quantization_dose("bf16", spread=spread) < quantization_dose("sqrt8", spread=spread)


@pytest.mark.parametrize("model", ["prior", "statistics"])
@pytest.mark.parametrize("spread", [0.2, 0.9, 2.5])
def test_more_bytes_within_a_rule_never_add_risk(model: str, spread: float):
    for rule in RULE_INFOS:
        ladder = [f"{rule}{suffix}" for suffix in ("_int4", "_int8", "_bf16", "") if f"{rule}{suffix}" in NATIVE]
        totals = [risk(spec, model=model, profile=profiled(spread=spread)).total for spec in ladder]
        assert totals == sorted(totals, reverse=True)


def test_a_block_of_small_tensors_loses_nothing_to_a_storage_that_leaves_them_alone():
    row, small, large = NATIVE["lion_int4"], BLOCKS["norm"], BLOCKS["layer1.mlp"]
    terms = [
        {cut.term for cut in cuts(RULE_INFOS[row.rule], storage=STORAGES[row.storage], block=block)}
        for block in (small, large)
    ]
    assert terms == [{"drop_v"}, {"drop_v", "quantize_m"}]


def test_what_no_statistic_tells_of_is_the_prior_s():
    profile = profiled(descent_share=1.0)
    assert risk("muon", model="statistics", profile=profile) == risk("muon")


def test_models_say_what_they_need():
    assert {name: set(model.needs) for name, model in RISKS.items()} == {
        "measured": set(),
        "prior": set(),
        "statistics": {"stats"},
    }
    assert all(model.name == name and model.description for name, model in RISKS.items())


def test_every_role_has_a_prior():
    for role in Role:
        block = Block(name="b", params=BLOCKS["layer1.mlp"].params, role=role)
        found = RISKS["prior"](
            block=block,
            spec=NATIVE["sign"],
            rule=RULE_INFOS["sign"],
            storage=STORAGES["fp32"],
            profile=None,
            weights={},
        )
        assert found.total > 0
