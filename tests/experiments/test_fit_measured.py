"""The table that is fitted of raw rows: on rows of a known truth, and the shipped file against its rows."""

import json
import random
from collections.abc import Mapping, Sequence

import pytest

from baoc.core.measured import families
from experiments.analysis import fit_measured
from experiments.analysis.fit_measured import (
    OUT,
    additivity,
    carry_over,
    chosen,
    difference,
    fit,
    settings_of_roles,
    shrunk,
)

ROLES = ("embedding", "head", "norm", "attention_qk", "attention_vo", "mlp_in", "mlp_out")
EFFECT = {"adamw_int8": 0.10, "foam_l2_int8": 0.05, "lion_int8": 0.02}
HIDDEN = ROLES[3:]


def leaves(tree: object, name: str = "") -> dict[str, object]:
    """Every value of nested mappings and sequences, by its path."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return {key: leaf for k, v in pairs for key, leaf in leaves(v, f"{name}/{k}").items()} or {name: tree}


def test_the_shipped_table_is_what_its_rows_give():
    """But for the last digit, which differs by the processor's sums."""
    shipped, fitted = (leaves(json.loads(text)) for text in (OUT.read_text(encoding="utf-8"), fit_measured.shipped()))
    assert shipped == {k: pytest.approx(v, abs=2e-8) if isinstance(v, float) else v for k, v in fitted.items()}, (
        "python -m experiments.analysis.fit_measured"
    )
    assert set(families()) == {"language", "vision", "diffusion"}


def row(label: str, *, phase: str, seed: int, value: float, role: str = "", spec: str = "", **more: object) -> dict:
    return {
        "phase": phase, "family": "language", "task": "language", "size": "nano", "steps": "600", "label": label,
        "role": role, "spec": spec, "factor": "1", "lr": "0.003", "seed": str(seed), "value": str(value),
        "choice": str(value), "state_bytes": "3939224", "state_fraction": ".1", "status": "finite", "recipe": "{}",
        "rate_factor": "1", "multiples": "", "beta2": "0.999",
    } | {key: str(given) for key, given in more.items()}  # fmt: skip


def made(*, super_additive: float = 1.0, noise: float = 0.002, seeds: int = 4, seed: int = 0) -> list[dict]:
    """Rows of a base, of single roles replaced and of two whole recipes, whose changes are known."""
    draw = random.Random(seed)
    rows: list[dict] = []
    for s in range(seeds):
        level = 2.0 + draw.gauss(0, 0.05)  # of the seed, which pairs take out

        def run(change: float, level: float = level) -> float:
            return level + change + draw.gauss(0, noise)

        rows.append(row("base", phase="roles", seed=s, value=run(0)))
        for role in HIDDEN:
            for spec, effect in EFFECT.items():
                own = effect + (0.03 if (role, spec) == ("mlp_in", "lion_int8") else 0.0)
                rows.append(
                    row(f"{role}={spec}", phase="roles", seed=s, value=run(own), role=role, spec=spec, factor=1)
                )
                worse = run(own + 1)
                rows.append(
                    row(f"{role}={spec}", phase="roles", seed=s, value=worse, role=role, spec=spec, factor=0.25)
                )
        sums = 4 * EFFECT["adamw_int8"], 4 * EFFECT["foam_l2_int8"] * super_additive
        rows.append(row("adamw8", phase="whole", seed=s, value=run(sums[0])))
        rows.append(row("foam8_lean", phase="whole", seed=s, value=run(sums[1])))
        rows.append(row("adamw_b95", phase="whole", seed=s, value=run(sums[0]), rate_factor=0.5))
        rows.append(row("adamw", phase="whole", seed=s, value=run(sums[0] + 0.2), rate_factor=1))
    return rows


def entries_of(rows: Sequence[Mapping[str, str]]) -> dict:
    return fit(rows)["families"]["language"][0]


def test_entries_have_the_truth_within_their_error_and_the_better_multiple():
    for seed in range(20):
        family = entries_of(made(seed=seed))
        errors = [
            abs(family["roles"][role][spec]["mean"] - effect) / family["roles"][role][spec]["sd"]
            for role in HIDDEN
            for spec, effect in EFFECT.items()
            if (role, spec) != ("mlp_in", "lion_int8")
        ]
        assert sum(error < 3 for error in errors) >= len(errors) - 1
        assert family["roles"]["mlp_in"]["lion_int8"]["multiple"] == 1
    assert family["reference"] == family["base"] == "muon8_lean"


def test_shrinking_halves_the_error_of_noisy_entries():
    """Entries of no interaction, measured with an error as large as the effects."""
    draw = random.Random(3)
    truth = {(role, spec): effect for role in ROLES for spec, effect in EFFECT.items()}
    squares = [0.0, 0.0]
    for _ in range(50):
        raw = {
            key: {"mean": effect + draw.gauss(0, 0.05), "sd": 0.05, "n": 4, "multiple": 1}
            for key, effect in truth.items()
        }
        fitted = shrunk(raw)
        squares[0] += sum((raw[key]["mean"] - effect) ** 2 for key, effect in truth.items())
        squares[1] += sum((fitted[key]["mean"] - effect) ** 2 for key, effect in truth.items())
    assert squares[1] < 0.6 * squares[0]


@pytest.mark.parametrize(("factor", "additive"), [(1.0, True), (2.5, False)])
def test_a_spec_whose_entries_do_not_add_up_is_told(factor: float, additive: bool):
    rules = entries_of(made(super_additive=factor))["rules"]
    assert rules["foam_l2_int8"]["additive"] is additive and rules["adamw_int8"]["additive"]
    assert rules["foam_l2_int8"]["factor"] == pytest.approx(factor, abs=0.15)
    assert "lion_int8" not in rules  # no recipe runs it in all hidden roles: nothing shows that it adds up


def test_a_rate_is_the_lowest_that_is_as_good_as_the_best():
    rows = [
        row("adamw8", phase="whole", seed=seed, value=value + 0.01 * seed, rate_factor=factor)
        for factor, value in ((1, 2.2), (2, 2.001), (4, 2.0))
        for seed in range(3)
    ]
    settings = settings_of_roles(rows, "language")
    assert chosen(settings).rate == 4  # pairs of seeds tell the two apart
    noisy = [
        r | {"choice": str(float(r["choice"]) + (0.004 if r["seed"] == "1" and r["rate_factor"] == "4" else 0))}
        for r in rows
    ]
    assert chosen(settings_of_roles(noisy, "language")).rate == 2


def test_adamw_is_the_best_of_its_betas_and_rates_are_multiples_of_the_product_s():
    family = entries_of(made())
    by_name = {held["recipe"]["name"]: held for held in family["recipes"]}
    assert "adamw_b95" not in by_name and by_name["adamw"]["rate"] == 0.5
    assert by_name["foam8_lean"]["rate"] == 1


def test_runs_that_diverged_have_no_entry():
    rows = [r | {"status": "diverged"} if r["role"] == "mlp_in" and r["spec"] == "lion_int8" else r for r in made()]
    assert "lion_int8" not in entries_of(rows)["roles"]["mlp_in"]


def test_the_table_is_json_of_the_same_bytes_again():
    rows = made()
    first, second = (fit_measured.text_of(fit(list(rows))) for _ in range(2))
    assert first == second and json.loads(first)["families"]["language"][0]["size"] == "nano"


def test_additivity_needs_every_entry():
    settings = settings_of_roles([r for r in made() if r["role"] != "mlp_out"], "language")
    base = next(one for one in settings if one.name == "muon8_lean")
    assert additivity(settings, base, HIDDEN) == {}


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_a_difference_without_shared_seeds_is_of_the_means():
    apart = difference({0: 1.0, 1: 3.0}, {2: 4.0, 3: 4.0, 4: 4.0})
    assert apart == {"mean": -2.0, "sd": pytest.approx(1.0), "n": 2}


def size_of(num_params: int, changes: Mapping[str, tuple[float, float]], **more: object) -> dict:
    """A size as the file has it: recipe -> (mean change, rate)."""
    recipes = [
        {"recipe": {"name": name, "base": name}, "rate": rate, "value": 2 + mean, "sd": 0.01, "uniform": True,
         "change": {"mean": mean, "sd": 0.003, "n": 4}, "against": {}}
        for name, (mean, rate) in changes.items()
    ]  # fmt: skip
    about = {"num_params": num_params, "size": f"{num_params}", "reference": "muon8_lean", "base": "muon8_lean"}
    return {**about, "recipes": recipes, "roles": {}} | more


SMALL = {
    "muon8_lean": (0.0, 2.0),
    "adamw": (0.3, 0.5),
    "adamw8": (0.31, 0.5),
    "muon4_lean": (0.05, 2.0),
    "lion8": (0.6, 1.0),
}
BOTH = {"muon8_lean": (0.0, 4.0), "adamw": (0.4, 0.5), "adamw8": (0.40, 0.5)}


@pytest.mark.parametrize(
    ("larger", "carried", "mean", "rate", "is_near"),
    [
        (BOTH, "muon4_lean", 0.05, 4.0, True),  # as 8-bit Muon: by its rule
        (BOTH, "lion8", 0.6 + 0.095 / 2, 1.0, False),  # its rule was run at one: by all others
        ({**BOTH, "muon8_lean": (0.0, 2.0)}, "muon4_lean", 0.05, 2.0, True),
        ({**BOTH, "muon4_lean": (0.09, 4.0)}, "lion8", 0.6 + (0.095 + 0.02) / 2, 1.0, False),
    ],
)
def test_what_was_not_run_at_a_size_is_carried_over_as_its_rule_moved(
    larger: Mapping[str, tuple[float, float]], carried: str, mean: float, rate: float, is_near: bool
):
    small, large = carry_over([size_of(10**6, SMALL), size_of(10**7, larger)])
    assert small == size_of(10**6, SMALL), "nothing is carried to a smaller size"
    by_name = {held["recipe"]["name"]: held for held in large["recipes"]}
    assert set(by_name) == set(SMALL)
    for name, (measured, _) in larger.items():
        assert by_name[name]["change"] == {"mean": measured, "sd": 0.003, "n": 4}
    found = by_name[carried]
    assert found["change"]["mean"] == pytest.approx(mean) and found["rate"] == pytest.approx(rate)
    assert found["value"] == pytest.approx(2 + mean) and found["change"]["carried"] == "1000000"
    assert found["against"]["adamw"]["mean"] == pytest.approx(mean - larger["adamw"][0])
    assert (found["change"]["sd"] < 0.04) is is_near and found["change"]["sd"] > 0.003
    assert [held["change"]["mean"] for held in large["recipes"]] == sorted(
        h["change"]["mean"] for h in large["recipes"]
    )


def test_errors_between_sizes_add_up_from_size_to_size():
    sizes = [size_of(10**6, SMALL), size_of(10**7, BOTH), size_of(10**8, BOTH)]
    sds = [
        next(held["change"]["sd"] for held in size["recipes"] if held["recipe"]["name"] == "lion8")
        for size in carry_over(sizes)
    ]
    assert sds[0] == 0.003 < sds[1] < sds[2]


def sd_at_the_largest(*sizes: dict, name: str) -> float:
    return next(held["change"]["sd"] for held in carry_over(sizes)[-1]["recipes"] if held["recipe"]["name"] == name)


def test_what_was_carried_to_a_size_tells_nothing_of_how_sizes_differ():
    """The largest size ran Lion, which the middle one has from the smallest alone: however far off it is."""
    small, middle = size_of(10**6, {**SMALL, "signum8": (0.6, 1.0)}), size_of(10**7, BOTH)
    found = [
        sd_at_the_largest(small, middle, size_of(10**8, {**BOTH, "lion8": (moved, 1.0)}), name="signum8")
        for moved in (0.6, 2.6)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("ran", [False, True])
def test_a_new_reference_that_was_carried_over_brings_its_error_to_all_that_are(ran: bool):
    """So 8-bit Muon at .95 has an error from the momentum of .9, which was run at the smallest and the largest size."""
    middle = {**BOTH, "muon4_lean": (0.05, 4.0)} if ran else BOTH
    largest = {"muon4_lean": (0.0, 4.0), "adamw": (0.4, 0.5), "adamw8": (0.40, 0.5)}
    sizes = [size_of(10**6, SMALL), size_of(10**7, middle), size_of(10**8, largest, reference="muon4_lean")]
    middle_sd = sd_at_the_largest(*sizes[:2], name="muon4_lean")
    alike = [*sizes[:2], sizes[2] | {"reference": "adamw"}]
    sd, without = (sd_at_the_largest(*held, name="muon8_lean") for held in (sizes, alike))
    assert sd == pytest.approx(without if ran else (without**2 + middle_sd**2) ** 0.5)


def test_roles_are_carried_over_with_what_roles_differ_in():
    def entry(mean: float) -> dict:
        return {"mean": mean, "sd": 0.001, "n": 4, "multiple": 1.0}

    small = size_of(
        10**6, SMALL, roles={"head": {"adamw": entry(0.01), "sign": entry(0.02)}, "norm": {"sign": entry(0.0)}}
    )
    large = size_of(10**7, BOTH, roles={"head": {"adamw": entry(0.04)}})
    roles = carry_over([small, large])[1]["roles"]
    assert roles["head"]["adamw"] == entry(0.04)
    for told in (roles["head"]["sign"], roles["norm"]["sign"]):
        assert told["carried"] == "1000000" and told["sd"] > 0.03  # the one entry of both differs by .03
    none = carry_over([small, size_of(10**7, BOTH)])[1]["roles"]
    assert none["head"]["adamw"]["mean"] == 0.01 and none["head"]["adamw"]["sd"] > 0.05  # as recipes of other rules


@pytest.mark.parametrize("larger", [{}, {"muon8_lean": (0.0, 1.0)}, {"adamw": (0.3, 1.0), "adamw8": (0.3, 1.0)}])
def test_sizes_that_share_too_little_are_refused(larger: Mapping[str, tuple[float, float]]):
    with pytest.raises(SystemExit, match="1000000 and 10000000 share no recipes of two rules"):
        carry_over([size_of(10**6, SMALL), size_of(10**7, larger)])


LARGER = {"size": "6m", "state_bytes": "52463916"}


def larger_rows() -> list[dict]:
    """A size with phases `again`, `attention` and `queries`, in which FOAM at twice the rate is better on queries and
    keys: by .07 on seeds that chose it, by .06 on fresh ones."""
    rows = []
    for s in range(4):
        level = 1.9 + 0.01 * s
        rows += [
            row(name, phase="whole", seed=s, value=level + more, **LARGER)
            for name, more in {"adamw": 0.3, "adamw8": 0.31, "foam8_lean": 0.2}.items()
        ]
        rows.append(row("base", phase="again", seed=s, value=level, **LARGER))
        rows.append(
            row(
                "attention_qk=foam_l2_int8@1",
                phase="again",
                seed=s,
                value=level - 0.06,
                role="attention_qk",
                spec="foam_l2_int8",
                **LARGER,
            )
        )
        seed = 40 + s
        rows.append(row("base", phase="attention", seed=seed, value=level, **LARGER))
        for label, more in {"attention_qk=foam_l2_int8@2": -0.07, "attention_vo=muon_int8@0.5": 0.02}.items():
            multiples = json.dumps({label.partition("=")[0]: float(label.partition("@")[2])})
            rows.append(
                row(
                    label,
                    phase="attention",
                    seed=seed,
                    value=level + more + 0.001 * (s % 2),
                    multiples=multiples,
                    **LARGER,
                )
            )
        both = json.dumps({"attention_qk": 2.0, "attention_vo": 1.0})
        rows.append(
            row(
                "attention_qk=foam_l2_int8@2,attention_vo=sign@1",
                phase="attention",
                seed=seed,
                value=1.0,
                multiples=both,
                **LARGER,
            )
        )
        rows.append(row("adamw@0.1", phase="attention", seed=seed, value=1.0, rate_factor=0.1, **LARGER))
        for spec, multiple, more in (("muon_int8", 1, 0.0), ("foam_l2_int8", 2, -0.06), ("foam_l2_int8", 4, -0.2)):
            label = f"attention_qk={spec}@{multiple},factor=1"
            rows.append(
                row(
                    label,
                    phase="queries",
                    seed=50 + s,
                    value=level + more + 0.001 * (s % 2),
                    role="attention_qk",
                    spec=spec,
                    factor=multiple,
                    **LARGER,
                )
            )
    return rows


def test_a_size_has_its_own_recipes_and_what_was_chosen_is_confirmed_on_fresh_seeds():
    small, large = fit([*made(), *larger_rows()])["families"]["language"]
    assert small == entries_of(made()) and (large["size"], large["num_params"]) == ("6m", 6557989)
    by_name = {held["recipe"]["name"]: held for held in large["recipes"]}
    best = by_name["muon8_qk"]
    assert best["change"]["mean"] == pytest.approx(-0.06, abs=1e-3) and best["change"]["n"] == 4
    assert "carried" not in best["change"] and best["against"]["adamw"]["mean"] == pytest.approx(-0.36, abs=2e-3)
    entry = large["roles"]["attention_qk"]["foam_l2_int8"]
    assert entry["multiple"] == 2 and entry["mean"] == pytest.approx(-0.06, abs=2e-3)
    assert large["roles"]["attention_vo"]["muon_int8"]["multiple"] == 0.5
    assert "carried" in large["roles"]["mlp_in"]["lion_int8"]
    assert "muon_int8" not in large["roles"]["attention_qk"], "it is the base itself"
    assert by_name["adamw"]["value"] == pytest.approx(2.215)  # without what phase `attention` ran at another rate
    # Rates are of what the product gives a network between its sizes: less than that of its smallest.
    assert by_name["muon8_lean"]["rate"] == pytest.approx(2.05, abs=0.01)


def test_runs_through_the_command_are_a_size_and_replace_the_same_size_of_the_role_study():
    rows = [
        {"group": "60m", "label": label, "seed": f"{seed + of}", "status": "finite", "value": f"{value + seed / 100}",
         "state_bytes": "204542252", "state_fraction": "1", "lr": lr, "num_steps": "400", "recipe": "x"}
        for label, lr, value, of in (
            ("adamw_0.5", "0.0005", 1.8, 0), ("adamw_1", "0.001", 1.9, 0), ("chosen_15", "", 1.6, 0),
            ("lean_m90", "", 1.6, 9), ("lean_m90_4", "0.004", 1.4, 9), ("qk_m90_2", "0.002", 1.37, 9),
        )
        for seed in range(3)
    ]  # fmt: skip
    role = [one | {"size": "25m", "state_bytes": "204542260"} for one in larger_rows()]
    sizes = fit([*made(), *role], product=rows)["families"]["language"]
    assert [size["size"] for size in sizes] == ["nano", "60m"]
    by_name = {held["recipe"]["name"]: held for held in sizes[1]["recipes"]}
    rates = {name: by_name[name]["rate"] for name in ("adamw", "muon8_lean_m90", "muon8_qk_m90")}
    assert rates == pytest.approx({"adamw": 0.5, "muon8_lean_m90": 4, "muon8_qk_m90": 2})
    assert by_name["adamw"]["change"]["mean"] == pytest.approx(0.4)  # on other seeds
    assert by_name["muon8_qk_m90"]["change"]["mean"] == pytest.approx(-0.03)
    assert by_name["muon8_qk"]["change"]["carried"] == "25m"


@pytest.mark.parametrize("group", ["60m_fresh", "60m_qk"])
def test_runs_of_the_choice_on_seeds_that_chose_nothing_count_alone(group: str):
    """`chosen_15` is what the measured choice ran on fresh seeds; elsewhere it is of a table of its day."""
    rows = [
        {"group": of, "label": label, "seed": f"{first + seed}", "status": "finite", "value": f"{value + seed / 100}",
         "state_bytes": "204542252", "state_fraction": "1", "lr": lr, "num_steps": "400", "recipe": "x"}
        for of, first, label, lr, value in (
            ("60m", 600, "adamw_0.5", "0.0005", 1.8), ("60m", 600, "foam8_lean", "", 1.9),
            ("60m_qk", 700, "lean_m90_4", "0.004", 1.4), ("60m_qk", 700, "qk_m90_2", "0.002", 1.37),
            (group, 800, "adamw_0.5", "0.0005", 1.8), (group, 800, "lean_m90_4", "0.004", 1.4),
            (group, 800, "chosen_15", "", 1.38),
        )
        for seed in range(4)
    ]  # fmt: skip
    role = [one | {"size": "25m", "state_bytes": "204542260"} for one in larger_rows()]
    size = fit([*made(), *role], product=rows)["families"]["language"][-1]
    by_name = {held["recipe"]["name"]: held for held in size["recipes"]}
    mean = -0.02 if group == "60m_fresh" else -0.03
    assert by_name["muon8_qk_m90"]["change"]["mean"] == pytest.approx(mean) and by_name["muon8_qk_m90"]["rate"] == 2
    assert by_name["foam8_lean"]["change"]["mean"] == pytest.approx(0.5)  # against the reference's other seeds
    assert by_name["foam8_lean"]["against"]["adamw"]["mean"] == pytest.approx(0.1)
