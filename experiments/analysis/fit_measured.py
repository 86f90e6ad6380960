"""Makes baoc/core/measured.json of the raw rows: whole recipes at their own best rate, and rules by role.

    python -m experiments.analysis.fit_measured  # seconds -> baoc/core/measured.json

A family has an entry for each size of network that was measured, the smallest first.

- Whole recipes. Of its settings (rate, beta2) a recipe takes that of the lowest rate whose `choice` is within half a
  percent of the least, and not distinguishable from it (90 %, paired): curves are flat at the top, and lower rates bear
  longer runs. Changes are of `value`, on data that chose nothing, paired by seed; of runs through the command the one
  value both chooses and is reported, which is all that there is of 350m. Of recipes that were run again on fresh seeds
  those count alone (FRESH, PRODUCT_FRESH). Rates are multiples of AdamW's: in study A of its best one, in the role
  study of the product's own, around which AdamW's curve is flat (`own_rate`).
- Rules by role. The change of the final loss where one role of the base runs another spec: d = role + spec +
  interaction. The first two are fitted by least squares; interactions are shrunk towards 0 by their variance over
  that of a measurement. All differences of a kind have one standard deviation, as each has few seeds.
- How they add up. A recipe that runs a spec in all hidden roles was measured as a whole, too: `factor` is its change
  over the sum of its entries. Where the two can be told apart (90 %) and differ by more than a tenth, or their
  difference is known less well than the sum is large, entries of the spec are not to be added.
- What was not run at a size is carried over from the next smaller one (`carry_over`), with an error between sizes that
  is estimated from what was run at both of two sizes in a row. Nothing is carried to smaller sizes.
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import numpy as np

from baoc.core.catalogue import SPECS
from baoc.core.measured import KAPPA, Change, faded_rate
from baoc.core.recipes import HIDDEN, RECIPES, recipe_from_node
from baoc.core.statistics import DEFAULT_LEVEL, student_quantile
from experiments.benchmarks import recipe_lists
from experiments.benchmarks.shared import read_rows

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
OUT = ROOT / "baoc" / "core" / "measured.json"
UNITS = {"language": "bits per byte", "vision": "nats", "diffusion": "MSE"}
# Raw rows: another size is one more file. Of the smallest networks' phase `attention` nothing is taken: it was run when
# their choices had been confirmed.
ROLE_ROWS = (
    "role_table.csv", "role_table_6m.csv", "role_attention_6m.csv", "role_queries_6m.csv", "role_queries_25m.csv"
)  # fmt: skip
PRODUCT_ROWS = ("size_runs.csv", "size_rates.csv")  # runs through the command
# Of these: family, size -> groups of rows that are one another's rivals, though their seeds may differ.
PRODUCT_SIZES: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("language", "60m"): ("60m", "60m_qk", "60m_fresh"),
    ("language", "350m"): ("350m_200",),
    ("vision", "small"): ("vit_small", "vit_small_fresh"),
    ("diffusion", "s2"): ("dit_s2", "dit_s2_fresh"),
}
# Label -> recipe. Labels that are not here ran at one rate that is not the best: the table of their day had faded it.
PRODUCT_LABELS: Mapping[str, dict[str, Any]] = {
    **{name: {"name": name, "base": name} for name in ("adamw", "adamw8", "foam8_lean", "adafactor_m8")},
    "lean_m90": {"name": "muon8_lean_m90", **recipe_lists.MORE_WHOLE["muon8_lean_m90"]},
    "qk_m90": {"name": "muon8_qk_m90", "base": "muon8_qk", "betas": {"muon": [0.9, 0.95]}},
    "muon8_m90": {
        "name": "muon8_m90", "embedding": "adamw", "norm": "adamw", "head": "adamw", "hidden": "muon_int8",
        "fallback": ["adamw"], "betas": {"muon": [0.9, 0.95]},
    },
}  # fmt: skip
# Group -> the label and the multiple of what `chosen_15` ran there. Where it ran at a rate far from Muon's best, as in
# dit_s2, it says nothing of the recipe.
PRODUCT_CHOSEN: Mapping[str, tuple[str, float]] = {
    "60m_fresh": ("qk_m90", 2.0),
    "vit_small": ("muon8_m90", 1.0),
    "vit_small_fresh": ("muon8_m90", 1.0),
    "dit_s2_fresh": ("lean_m90", 8.0),
}
PRODUCT_FRESH = ("60m_fresh", "vit_small_fresh", "dit_s2_fresh")  # groups on seeds that chose nothing
ALIKE_SIZES = 1.01  # sizes less apart are one, measured in two ways
# Phases of the role study on seeds that chose nothing; but at 25m `queries` came first, and its seeds chose the base's
# rate and the multiples, too, by `choice`.
FRESH = ("confirm", "queries")
PHASES = ("rates", "whole", "roles", "again", "attention", *FRESH)  # mixtures, controls, long runs are told elsewhere
# The product's rates for its sizes, a Llama's on bytes: parameters -> rate. At 6.6M AdamW's best one is half of what
# lies between nano's and 60m's, as it is half of the product's at these.
OWN_RATES: Mapping[str, Mapping[int, float]] = {
    "language": {492_403: 3e-3, 25_567_781: 1e-3, 302_957_677: 6e-4},
    "vision": {205_104: 3e-3, 21_472_906: 1e-3},
    "diffusion": {330_537: 1e-2, 32_469_508: 4e-4},
}
ROLE_RATES = recipe_lists.ROLE_LRS  # that factors of the role study are multiples of, at all sizes
# What phase `queries` ran as a whole recipe, by label: the best of phase `attention` and its rival.
QUERIED = {"attention_qk=muon_int8@1": "muon8_lean", "attention_qk=foam_l2_int8@2": "muon8_qk"}
# What the role study confirmed under the name of a budget, by task.
CONFIRMED: Mapping[tuple[str, str], str] = {
    ("language", "choice_10"): "muon4_lean_m90",
    ("diffusion", "choice_10"): "muon4_lean_m90",
    ("vision", "choice_10"): "muon4_outer8_m90",
    ("language", "choice_mixed_10"): "muon48_vo_out_m90",
    ("vision", "choice_mixed_10"): "muon48_vo_m90",
    ("vision", "choice_15"): "muon8_norm8_m90",
    ("diffusion", "choice_15"): "muon8_outer4_norm8_m90",
    ("vision", "choice_mixed_15"): "muon8_foam_qk_m90",
    ("diffusion", "choice_mixed_15"): "muon84_modulation_m90",
    ("language", "choice_outer32_25"): "muon8_m90",
    ("vision", "choice_outer32_25"): "muon8_m90",
    ("diffusion", "choice_outer32_25"): "muon8_m90",
}
ALIKE = 0.1  # of the sum: what may be left though it can be told
WIDEST = 1.0  # half of an interval, as a share of the sum, beyond which it tells nothing
HIDDEN_ROLES = ("attention", "mlp", "modulation", "conv", "other")
MORE: Mapping[str, dict[str, Any]] = recipe_lists.MORE_WHOLE  # recipes of the role study beside the catalogue's
BASE = recipe_lists.ROLE_BASE
ADAMW = "adamw"
FEW = 4  # recipes: of so few, all rates tell how far differences spread
WIDE = 180  # characters of a line of the file
FLAT = 0.005  # of the least mean: what a lower rate may cost at most
Row = Mapping[str, str]
Values = Mapping[int, float]  # by seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One recipe at one rate and beta2: `value` and `choice` by seed. `role`, `spec`: what was replaced of the base."""

    name: str
    rate: float
    value: Values
    choice: Values
    recipe: dict[str, Any]  # as a recipe's node
    state_bytes: int
    role: str = ""
    spec: str = ""
    multiple: float = 1.0
    fresh: bool = False  # of FRESH or PRODUCT_FRESH: counts alone where its recipe was run on other seeds, too


# -- raw rows ---------------------------------------------------------------------------------------------------------


def settings_of_roles(rows: Iterable[Row], family: str) -> list[Setting]:
    """Settings of the role study: recipes as wholes, fresh ones apart, and single roles replaced."""
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row["task"] == family and row["phase"] in PHASES:
            for name, role, spec, multiple in what_ran(row, family):
                fresh = row["phase"] in FRESH
                found[name, role, spec, float(row["rate_factor"]), multiple, fresh].append(row)
    made: list[Setting] = []
    for (name, role, spec, rate, multiple, fresh), held in found.items():
        node = _node(held[0], name=name)
        made.append(_setting(name, held, rate=rate, recipe=node, role=role, spec=spec, multiple=multiple, fresh=fresh))
    return made


def what_ran(row: Row, family: str) -> Iterable[tuple[str, str, str, float]]:
    """(recipe, role, its spec, its multiple of the rate), the last three of a replacement alone.

    Of phase `attention` only single roles count: its whole recipes ran at the rates that phase `rates` left out, on
    other seeds than the rest, and its pairs of roles were no better.
    """
    label = row["label"].partition(",factor")[0]
    name = label.partition("@")[0]
    if row["role"]:
        yield name, row["role"], row["spec"], float(row["factor"])
        if row["phase"] == "queries" and label in QUERIED:
            yield QUERIED[label], "", "", 1.0
    elif row["phase"] == "attention" and name != "base":
        if row["multiples"] and "," not in label:
            role, _, spec = name.partition("=")
            yield name, role, spec, float(json.loads(row["multiples"])[role])
    elif not name.startswith(("random_", "permuted_")):
        yield BASE if name == "base" else CONFIRMED.get((family, name), name), "", "", 1.0


def settings_of_product(rows: Iterable[Row], *, rate: float) -> list[Setting]:
    """Settings of runs through the command, whose own learning rate is `rate`. Their only value chooses theirs, too."""
    found: dict[tuple[str, float, bool], list[Row]] = defaultdict(list)
    for row in rows:
        label = next((name for name in PRODUCT_LABELS if row["label"].startswith(f"{name}_")), row["label"])
        multiple, fresh = float(row["lr"] or rate) / rate, row["group"] in PRODUCT_FRESH
        if label == "chosen_15" and row["group"] in PRODUCT_CHOSEN:
            label, multiple = PRODUCT_CHOSEN[row["group"]]
        if label in PRODUCT_LABELS:
            found[label, multiple, fresh].append({**row, "choice": row["value"]})
    return [
        _setting(PRODUCT_LABELS[label]["name"], held, rate=multiple, recipe=PRODUCT_LABELS[label], fresh=fresh)
        for (label, multiple, fresh), held in found.items()
    ]


def _node(row: Row, *, name: str) -> dict[str, Any]:
    """What a row ran, in the words of a recipe. Those confirmed by budget run Muon at momentum .9."""
    if name in RECIPES:
        return {"name": name, "base": name}
    if name in MORE:
        return {"name": name, **MORE[name]}
    by_role = {role: spec for role, spec in json.loads(row["recipe"]).items() if "." not in role}
    hidden = {spec for role, spec in by_role.items() if role.split("_")[0] in HIDDEN_ROLES}
    if len(hidden) == 1:
        by_role = {role: spec for role, spec in by_role.items() if role.split("_")[0] not in HIDDEN_ROLES}
        by_role["hidden"] = hidden.pop()
    betas = {"muon": [0.9, 0.95]} if name in CONFIRMED.values() else {}
    return {
        "name": name,
        **by_role,
        "fallback": [by_role["embedding"]] if "embedding" in by_role else [],
        "betas": betas,
    }


def _setting(name: str, rows: Sequence[Row], *, rate: float, recipe: dict[str, Any], **replaced: Any) -> Setting:
    def values(column: str) -> dict[int, float]:
        return {int(row["seed"]): float(row[column]) if row["status"] == "finite" else math.inf for row in rows}

    size = int(rows[0]["state_bytes"] or 0)
    return Setting(
        name=name,
        rate=rate,
        recipe=recipe,
        value=values("value"),
        choice=values("choice"),
        state_bytes=size,
        **replaced,
    )


# -- whole recipes ----------------------------------------------------------------------------------------------------


def difference(ours: Values, theirs: Values, *, sd: float | None = None) -> dict[str, Any]:
    """Mean of ours - theirs over shared seeds, and that mean's standard deviation; `sd` is one pair's where known.
    Without shared seeds it is the difference of the means."""
    paired = differences(ours, theirs)
    if not paired:
        squares = [stdev(held.values()) ** 2 / len(held) if len(held) > 1 else math.nan for held in (ours, theirs)]
        mean = fmean(ours.values()) - fmean(theirs.values())
        return {"mean": mean, "sd": math.sqrt(sum(squares)), "n": min(len(ours), len(theirs))}
    spread = stdev(paired) if sd is None and len(paired) > 1 else sd if sd is not None else math.nan
    return {"mean": fmean(paired), "sd": spread / math.sqrt(len(paired)), "n": len(paired)}


def chosen(settings: Sequence[Setting]) -> Setting:
    """The setting of the lowest rate that is as good as that of the least mean of `choice`, on seeds that all have."""
    seeds = set.intersection(*(set(one.choice) for one in settings))
    means = {id(one): fmean(one.choice[seed] for seed in seeds) for one in settings}
    best = min(settings, key=lambda one: means[id(one)])
    near = [best]
    for one in settings:
        more = difference({seed: one.choice[seed] for seed in seeds}, best.choice)
        if one is not best and math.isfinite(more["mean"]):
            half = Change(**more).half
            near += [one] if more["mean"] <= min(half, FLAT * abs(means[id(best)])) else []
    return min(near, key=lambda one: (one.rate, means[id(one)]))


def best_of(settings: Sequence[Setting]) -> dict[str, Setting]:
    """Name -> its chosen setting, of those that did not diverge; AdamW is the best of its betas."""
    by_name: dict[str, list[Setting]] = defaultdict(list)
    for one in settings:
        by_name["adamw" if one.name.startswith("adamw_b") else one.name].append(one)
    best = {name: chosen(held) for name, held in by_name.items()}
    return {name: one for name, one in best.items() if all(map(math.isfinite, one.value.values()))}


def differences(ours: Values, theirs: Values) -> list[float]:
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def typical_sd(pairs: Iterable[Sequence[float]]) -> float:
    """The standard deviation of differences, by the median of their variances; NaN where none has two values.

    The median, as some recipes spread far more than the rest; over that of a chi-squared variable of as many degrees.
    """
    held = [values for values in pairs if len(values) > 1 and any(values)]
    if not held:
        return math.nan
    degrees = median(len(values) - 1 for values in held)
    return math.sqrt(median(stdev(values) ** 2 for values in held) / (1 - 2 / (9 * degrees)) ** 3)


def hidden_specs(node: Mapping[str, Any]) -> set[str]:
    recipe = recipe_from_node(node)
    return {spec for role, spec in recipe.specs.items() if role == "hidden" or role.split("_")[0] in HIDDEN_ROLES}


def wholes(settings: Sequence[Setting], *, unit: float | None = None) -> tuple[list[dict[str, Any]], str]:
    """Recipes as the file holds them, and the reference: the uniform of the least mean value.

    `unit`: the rate that multiples are of; by default AdamW's best one.
    """
    cohorts = [[one for one in settings if one.fresh], [one for one in settings if not one.fresh]]
    best = [best_of(cohort) for cohort in cohorts]
    names = list(dict.fromkeys(name for held in best for name in held))
    first = best[0] or best[1]  # the reference is chosen among fresh ones where there are such
    uniform = {name: len(hidden_specs((best[0].get(name) or best[1][name]).recipe)) <= 1 for name in names}
    reference = min((n for n in first if uniform[n]), key=lambda name: fmean(first[name].value.values()))
    made: list[dict[str, Any]] = []
    for name in names:
        cohort = best[0] if name in best[0] else best[1]
        one, own = cohort[name], cohort.get(reference)
        if own is None:
            continue
        rivals = list(cohort.values()) if len(cohort) > FEW else [o for o in settings if o.fresh == one.fresh]
        sd = typical_sd([differences(other.value, own.value) for other in rivals])
        others = sorted((o for o in cohort if o != name), key=lambda o: fmean(cohort[o].value.values()))
        specs = hidden_specs(one.recipe)
        rival = next((o for o in others if uniform[o] and hidden_specs(cohort[o].recipe) != specs), None)
        beside = list(dict.fromkeys(o for o in (rival, "adamw") if o is not None and o in cohort and o != name))
        made.append(
            {
                "recipe": {**one.recipe, "name": name},
                "rate": one.rate / (unit or cohort["adamw"].rate),
                "value": fmean(one.value.values()),
                "sd": stdev(one.value.values()) if len(one.value) > 1 else math.nan,
                "uniform": uniform[name],
                "change": difference(one.value, own.value, sd=sd if one is not own else 0.0),
                "against": {other: difference(one.value, cohort[other].value, sd=sd) for other in beside},
            }
        )
    by_name = {held["recipe"]["name"]: held for held in made}
    for held in made:  # what did not run on the same seeds is compared by way of the reference
        if ADAMW in by_name and ADAMW not in held["against"] and held is not by_name[ADAMW]:
            held["against"][ADAMW] = apart(held["change"], by_name[ADAMW]["change"])
    return sorted(made, key=lambda held: held["change"]["mean"]), reference


def apart(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The difference of two changes that were measured on their own."""
    sd = math.hypot(ours["sd"], theirs["sd"])
    return {"mean": ours["mean"] - theirs["mean"], "sd": sd, "n": min(ours["n"], theirs["n"])}


# -- rules by role ----------------------------------------------------------------------------------------------------


def base_of_roles(settings: Sequence[Setting], name: str | None) -> Setting | None:
    """The base at the rate at which roles were replaced, on all of its seeds; None if it was not run."""
    held = [one for one in settings if one.name == name and not one.role]
    if not held:
        return None
    others = [one for one in held if not one.fresh]
    rate = (max(others, key=lambda one: len(one.value)) if others else chosen(held)).rate
    same = [one for one in held if one.rate == rate]
    value = {seed: value for one in same for seed, value in one.value.items()}
    choice = {seed: value for one in same for seed, value in one.choice.items()}
    return replace(same[0], value=value, choice=choice)


def best_of_roles(settings: Sequence[Setting], base: Setting) -> dict[tuple[str, str], Setting]:
    """(role, spec) -> the best of its multiples of the rate by `choice`; none of those that diverged. Fresh runs of
    that multiple count alone; they choose it where there are no others."""
    own = recipe_from_node(base.recipe).specs
    replaced_by_none = {(one.role, own.get(one.role, own.get(HIDDEN))) for one in settings}
    tried: dict[tuple[str, str], list[Setting]] = defaultdict(list)
    for one in settings:
        is_base = one.multiple == 1 and (one.role, one.spec) in replaced_by_none
        if one.role and not is_base and one.rate == base.rate and one.value.keys() & base.value.keys():
            tried[one.role, one.spec].append(one)
    best: dict[tuple[str, str], Setting] = {}
    for key, held in tried.items():
        chose = [one for one in held if not one.fresh] or held
        found = min(chose, key=lambda one: fmean(differences(one.choice, base.choice)))
        best[key] = next((one for one in held if one.fresh and one.multiple == found.multiple), found)
    return {key: one for key, one in best.items() if all(map(math.isfinite, one.value.values()))}


def entries(settings: Sequence[Setting], base: Setting, *, otherwise: float) -> dict[tuple[str, str], dict[str, Any]]:
    """(role, spec) -> raw change, with the standard deviation that all of them have together, or `otherwise`."""
    best = best_of_roles(settings, base)
    paired = [differences(one.value, base.value) for one in best.values()]
    sd = typical_sd(paired) if any(len(values) > 1 for values in paired) else otherwise
    return {key: {**difference(one.value, base.value, sd=sd), "multiple": one.multiple} for key, one in best.items()}


def shrunk(raw: Mapping[tuple[str, str], Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """The entries as role + spec + interaction, interactions shrunk by the share of their variance that is real."""
    if not raw:
        return {}
    keys = list(raw)
    roles, specs = sorted({role for role, _ in keys}), sorted({spec for _, spec in keys})
    design = np.zeros((len(keys), len(roles) + len(specs)))
    for index, (role, spec) in enumerate(keys):
        design[index, roles.index(role)] = design[index, len(roles) + specs.index(spec)] = 1.0
    y = np.array([raw[key]["mean"] for key in keys])
    noise = np.array([raw[key]["sd"] for key in keys]) ** 2
    hat = design @ np.linalg.pinv(design)  # symmetric: fitted = hat @ y
    fitted = hat @ y
    free = max(len(keys) - round(float(np.trace(hat))), 1)
    real = max(float(((y - fitted) ** 2).sum()) / free - float(noise.mean()), 0.0)  # variance of interactions
    keep = real / (real + noise) if real > 0 else np.zeros_like(noise)
    means = fitted + keep * (y - fitted)
    weights = hat + keep[:, None] * (np.eye(len(keys)) - hat)  # means = weights @ y
    variance = (weights**2) @ noise + (1 - keep) ** 2 * real
    return {
        key: {"mean": float(mean), "sd": math.sqrt(var), "n": raw[key]["n"], "multiple": raw[key]["multiple"]}
        for key, mean, var in zip(keys, means, variance, strict=True)
    }


def additivity(settings: Sequence[Setting], base: Setting, roles: Sequence[str]) -> dict[str, dict[str, Any]]:
    """spec -> how its entries add up to the recipe that runs it in all hidden roles; outer roles' entries count too.

    What is left between them is taken seed by seed, as all of them are held against the same base.
    """
    single = best_of_roles(settings, base)
    found: dict[str, dict[str, Any]] = {}
    own = recipe_from_node(base.recipe)
    for one in settings:
        specs = hidden_specs(one.recipe) if not one.role and not one.fresh and one.name != base.name else set()
        if len(specs) != 1 or (spec := next(iter(specs))) in found or spec in hidden_specs(base.recipe):
            continue
        recipe = recipe_from_node(one.recipe)
        moved = {role: spec if role.split("_")[0] in HIDDEN_ROLES else recipe.specs.get(role, "") for role in roles}
        moved = {role: to for role, to in moved.items() if to != own.specs.get(role, own.specs.get("hidden"))}
        if any((role, to) not in single for role, to in moved.items()):
            continue
        parts = [single[role, to].value for role, to in moved.items()]
        seeds = set.intersection(*(set(values) for values in (one.value, base.value, *parts)))
        if len(seeds) < 2:
            continue
        total = {seed: sum(values[seed] - base.value[seed] for values in parts) for seed in seeds}
        whole = {seed: one.value[seed] - base.value[seed] for seed in seeds}
        left = difference(whole, total)
        half = Change(**left).half
        size = abs(fmean(total.values()))
        if size and math.isfinite(left["mean"]):
            found[spec] = {
                "factor": fmean(whole.values()) / fmean(total.values()),
                "sd": left["sd"] / size,
                "additive": abs(left["mean"]) <= max(half, ALIKE * size) and half <= WIDEST * size,
            }
    return found


# -- sizes ------------------------------------------------------------------------------------------------------------


def rules_of(node: Mapping[str, Any]) -> frozenset[str]:
    """The rules that a recipe runs on hidden matrices."""
    return frozenset(SPECS[spec].rule for spec in hidden_specs(node))


def main_rule(node: Mapping[str, Any]) -> frozenset[str]:
    """The rule of the largest part of a recipe that runs several."""
    specs = recipe_from_node(node).specs
    return frozenset({SPECS[specs.get(HIDDEN) or specs.get("mlp_in") or min(hidden_specs(node))].rule})


def spread_of(lists: Sequence[Sequence[float]], *, about_mean: bool) -> float:
    """The standard deviation in several lists, about each one's mean or about 0, as a bound at 90 % reads it: times
    Student's quantile of its degrees over the normal one. NaN without degrees."""
    degrees = sum(len(held) - about_mean for held in lists)
    if not degrees:
        return math.nan
    total = sum((value - about_mean * fmean(held)) ** 2 for held in lists for value in held)
    return math.sqrt(total / degrees) * student_quantile(DEFAULT_LEVEL, degrees=degrees) / KAPPA


def carry_over(sizes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sizes of a family, the smallest first, with what was not run at one carried over from the one before.

    - A recipe changes as those of its rules changed between the two sizes. Its standard deviation grows by what recipes
      of the same rules differ in; by what rules differ in, if none of its rules, or only its main one, was run at both.
      If the reference is another one that was itself carried over to the smaller size, it grows by that one's, too.
      Its multiple of the rate moves with theirs; without such recipes it fades.
    - An entry of a role stays. Its standard deviation grows by what entries that were run at both differ in.

    Both are estimated from all pairs of sizes up to this one, by what was run at both of a pair.
    """
    done = [*sizes[:1]]
    in_rules: list[list[float]] = []  # what each rule's recipes changed in between two sizes
    of_rules: list[list[float]] = []  # the means of these, of each pair of sizes
    of_roles: list[list[float]] = []
    for size in sizes[1:]:
        smaller = done[-1]
        ours = {held["recipe"]["name"]: held for held in size["recipes"]}
        before = {held["recipe"]["name"]: held for held in smaller["recipes"]}
        groups: dict[frozenset[str], list[tuple[float, float]]] = defaultdict(list)
        ran: dict[frozenset[str], list[float]] = defaultdict(list)  # of these, what was run at both
        for name in ours.keys() & before.keys():
            moved = ours[name]["change"]["mean"] - before[name]["change"]["mean"]
            groups[rules_of(before[name]["recipe"])].append(
                (moved, math.log(ours[name]["rate"] / before[name]["rate"]))
            )
            if "carried" not in before[name]["change"]:
                ran[rules_of(before[name]["recipe"])].append(moved)
        in_rules += ran.values()
        of_rules.append([*map(fmean, ran.values())] or [0.0])
        across = spread_of(of_rules, about_mean=True)
        if math.isnan(across):
            raise SystemExit(
                f"{smaller['size']} and {size['size']} share no recipes of two rules, so nothing says how changes "
                "differ between sizes: run such recipes at both"
            )
        within = spread_of(in_rules, about_mean=True)
        within = across if math.isnan(within) else within
        entries_of = [
            {(role, spec): entry for role, held in one["roles"].items() for spec, entry in held.items()}
            for one in (smaller, size)
        ]
        shared = [key for key in entries_of[1] if "carried" not in entries_of[0].get(key, {"carried": ""})]
        of_roles.append([entries_of[1][key]["mean"] - entries_of[0][key]["mean"] for key in shared])
        by_role = spread_of(of_roles, about_mean=False)
        reference = before.get(size["reference"], {"change": {}})["change"]  # its error is that of all, if it is new
        error = reference["sd"] if "carried" in reference and smaller["reference"] != size["reference"] else 0.0
        carried = {
            name: _carried(
                held, smaller, size, groups, within=math.hypot(within, error), across=math.hypot(across, error)
            )
            for name, held in before.items()
            if name not in ours
        }
        every = {**ours, **carried}
        for held in carried.values():
            beside = [o for o in (size["reference"], ADAMW) if o in every and o != held["recipe"]["name"]]
            held["against"] = {other: apart(held["change"], every[other]["change"]) for other in dict.fromkeys(beside)}
        roles: dict[str, dict[str, Any]] = {role: dict(held) for role, held in size["roles"].items()}
        for (role, spec), entry in entries_of[0].items():
            sd = math.hypot(entry["sd"], across if math.isnan(by_role) else by_role)
            told = {**entry, "sd": sd, "carried": entry.get("carried", smaller["size"])}
            roles.setdefault(role, {}).setdefault(spec, told)
        recipes = sorted(every.values(), key=lambda held: held["change"]["mean"])
        done.append({**size, "recipes": recipes, "roles": roles})
    return done


def _carried(
    held: Mapping[str, Any],
    smaller: Mapping[str, Any],
    size: Mapping[str, Any],
    groups: Mapping[frozenset[str], Sequence[tuple[float, float]]],
    *,
    within: float,
    across: float,
) -> dict[str, Any]:
    """A recipe of a smaller size as `carry_over` tells. `groups`: rules -> (what the change of a recipe grew by, what
    the logarithm of its rate grew by), of recipes that were run at both sizes."""
    same, alike = (groups.get(rules(held["recipe"]), ()) for rules in (rules_of, main_rule))
    near = same or alike
    moved = fmean(change for change, _ in near) if near else fmean(fmean(c for c, _ in one) for one in groups.values())
    rate = held["rate"] * math.exp(fmean(log for _, log in near)) if near else held["rate"]
    if not near:
        rate = faded_rate(rate, num_params=size["num_params"], measured=smaller["num_params"])
    change = held["change"]
    mean = change["mean"] + moved
    reference = next(one for one in size["recipes"] if one["recipe"]["name"] == size["reference"])
    return {
        **held,
        "rate": rate,
        "value": reference["value"] + mean,
        "change": {
            "mean": mean,
            "sd": math.hypot(change["sd"], within if same else across),
            "n": change["n"],
            "carried": change.get("carried", smaller["size"]),
        },
    }


# -- the file ---------------------------------------------------------------------------------------------------------


def family_of_rows(
    settings: Sequence[Setting], *, base: str | None, about: Mapping[str, Any], unit: float | None = None
) -> dict[str, Any]:
    """A family as the file holds it. `base` is the recipe of which roles were replaced."""
    recipes, reference = wholes([one for one in settings if not one.role], unit=unit)
    of_base = base_of_roles(settings, base)
    base_sd = max((one["change"]["sd"] * math.sqrt(one["change"]["n"]) for one in recipes), default=math.nan)
    raw = entries(settings, of_base, otherwise=base_sd) if of_base is not None else {}
    fitted = shrunk(raw)
    roles: dict[str, dict[str, Any]] = defaultdict(dict)
    for (role, spec), change in fitted.items():
        roles[role][spec] = change
    hidden = [role for role in roles if role != "first"]
    rules = additivity(settings, of_base, hidden) if of_base is not None else {}
    return {**about, "reference": reference, "base": base, "recipes": recipes, "roles": dict(roles), "rules": rules}


def formats_of(rows: Sequence[Row], family: str) -> dict[str, dict[str, Any]]:
    """Format of the weights -> change against fp32 weights, of runs of the product under 8-bit Muon."""
    values: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row["group"] == family and row["status"] == "finite":
            values[row["label"]][int(row["seed"])] = float(row["value"])
    native = values.get("muon8_native") or values.get("chosen_15", {})
    labels = {name: f"muon8_{name}" for name in ("split8", "bf16_sr")}
    return {name: difference(values[label], native) for name, label in labels.items() if label in values}


def own_rate(family: str, num_params: int) -> float:
    """The product's learning rate for a network of a family, which multiples are of: between sizes by a power."""
    held = OWN_RATES.get(family, {num_params: ROLE_RATES[family]})
    sizes, rates = ([math.log(value) for value in column] for column in (held, held.values()))
    return math.exp(float(np.interp(math.log(num_params), sizes, rates)))


def about_of(rows: Sequence[Row], *, unit: str, size: str) -> dict[str, Any]:
    """What runs of a size have in common. Parameters are counted by fp32 AdamW's state."""
    adamw = [int(row["state_bytes"]) for row in rows if row["label"].partition("@")[0].partition("_")[0] == ADAMW]
    state = adamw[0] if adamw else round(int(rows[0]["state_bytes"]) / float(rows[0]["state_fraction"]))
    steps = int(rows[0].get("steps") or rows[0]["num_steps"])
    about: dict[str, Any] = {"unit": unit, "num_params": state // 8, "size": size, "steps": steps}
    return about | {"horizon": f"{steps} steps, data that hardly repeat"}


def fit(
    roles: Sequence[Row],
    *,
    formats: Sequence[Row] = (),
    product: Sequence[Row] = (),
) -> dict[str, Any]:
    """The file. `roles`: rows of the role study, at one or several sizes; `formats`: of formats of the weights;
    `product`: of runs of sizes through the command."""
    made: dict[str, Any] = {}
    for family, unit in UNITS.items():
        own = [row for row in roles if row["task"] == family]
        sizes: list[dict[str, Any]] = []
        for size in dict.fromkeys(row["size"] for row in own):
            rows = [row for row in own if row["size"] == size]
            about = about_of(rows, unit=unit, size=size)
            factor = own_rate(family, about["num_params"]) / ROLE_RATES[family]
            sizes.append(family_of_rows(settings_of_roles(rows, family), base=BASE, about=about, unit=factor))
        for (of, size), groups in PRODUCT_SIZES.items():
            rows = [row for row in product if of == family and row["group"] in groups]
            if rows:
                about = about_of(rows, unit=unit, size=size)
                for held in sizes:
                    if 1 / ALIKE_SIZES < held["num_params"] / about["num_params"] < ALIKE_SIZES:
                        held["num_params"] = about["num_params"]
                settings = settings_of_product(rows, rate=own_rate(family, about["num_params"]))
                sizes.append(family_of_rows(settings, base=BASE, about=about, unit=1.0))
        if sizes:
            whole = carry_over(sorted(sizes, key=lambda held: held["num_params"]))
            # Of two ways to measure one size the later has what was carried over from the other.
            by_size = {held["num_params"]: held for held in whole}
            weights = formats_of(formats, family)
            made[family] = [{**held, "weights": weights} for held in by_size.values()]
    return {"command": "python -m experiments.analysis.fit_measured", "families": rounded(made)}


def rounded(value: Any) -> Any:
    """Floats to six significant digits, of which the last may differ between processors."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(held) for key, held in value.items()}
    return [rounded(held) for held in value] if isinstance(value, list) else value


def text_of(held: Any, *, indent: str = "") -> str:
    """Values as JSON, in lines of WIDE characters where they can be divided."""
    line = json.dumps(held)
    if len(line) + len(indent) <= WIDE or not isinstance(held, dict | list):
        return line
    inner = indent + " "
    if isinstance(held, dict):
        parts = [f"{json.dumps(key)}: {text_of(value, indent=inner)}" for key, value in held.items()]
    else:
        parts = [text_of(value, indent=inner) for value in held]
    ends = "{}" if isinstance(held, dict) else "[]"
    return f"{ends[0]}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{ends[1]}"


def shipped() -> str:
    """The file as the recorded rows give it."""
    roles = [row for name in ROLE_ROWS for row in read_rows(RESULTS / name)]
    product = [row for name in PRODUCT_ROWS for row in read_rows(RESULTS / name)]
    return text_of(fit(roles, formats=read_rows(RESULTS / "product_runs.csv"), product=product)) + "\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found = shipped()
    OUT.write_text(found, encoding="utf-8")
    for name, sizes in json.loads(found)["families"].items():
        for held in sizes:
            print(f"{name}: {held['num_params']:,} parameters, reference {held['reference']}, {held['horizon']}")
            for one in held["recipes"]:
                change = one["change"]
                print(
                    f"  {one['recipe']['name']:16s} {one['value']:.4f} ({one['sd']:.4f}) {change['mean']:+.4f} "
                    f"({change['sd']:.4f}) n {change['n']} rate x{one['rate']:.3g} {change.get('carried', '')}"
                )


if __name__ == "__main__":
    main()
