"""Makes baoc/core/measured.json of the raw rows: whole recipes at their own best rate, and rules by role.

    python -m experiments.analysis.fit_measured  # seconds -> baoc/core/measured.json

- Whole recipes. Of its settings (rate, beta2) a recipe takes that of the lowest rate whose `choice` is within half a
  percent of the least, and not distinguishable from it (90 %, paired): curves are flat at the top, and lower rates bear
  longer runs. Changes are of `value`, on data that chose nothing, paired by seed; of recipes that were run again on
  fresh seeds (phase confirm) those count alone. Rates are multiples of AdamW's: in
  study A of its best one, in the role study of the product's own, around which AdamW's curve is flat.
- Rules by role. The change of the final loss where one role of the base runs another spec: d = role + spec +
  interaction. The first two are fitted by least squares; interactions are shrunk towards 0 by their variance over
  that of a measurement. All differences of a kind have one standard deviation, as each has few seeds.
- How they add up. A recipe that runs a spec in all hidden roles was measured as a whole, too: `factor` is its change
  over the sum of its entries. Where the two can be told apart (90 %) and differ by more than a tenth, or their
  difference is known less well than the sum is large, entries of the spec are not to be added.
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import numpy as np

from baoc.core.measured import Change
from baoc.core.recipes import RECIPES, recipe_from_node
from experiments.benchmarks import recipe_lists
from experiments.benchmarks.shared import read_rows

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
OUT = ROOT / "baoc" / "core" / "measured.json"
UNITS = {"language": "bits per byte", "vision": "nats", "diffusion": "MSE"}
FRESH = "confirm"  # phase of the role study on seeds that chose nothing
PHASES = ("rates", "whole", "roles", FRESH)  # mixtures, controls and long runs are told elsewhere
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
    fresh: bool = False  # on seeds that chose neither recipe nor rate


# -- raw rows ---------------------------------------------------------------------------------------------------------


def settings_of_roles(rows: Iterable[Row], family: str) -> list[Setting]:
    """Settings of the role study: recipes as wholes, fresh ones apart, and single roles replaced (phase roles)."""
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        name = row["label"].partition("@")[0]
        if row["task"] == family and row["phase"] in PHASES and not name.startswith(("random_", "permuted_")):
            multiple = row["factor"] if row["role"] else "1"
            name = BASE if name == "base" else CONFIRMED.get((family, name), name)
            key = (name, row["role"], row["spec"], float(row["rate_factor"]), float(multiple), row["phase"] == FRESH)
            found[key].append(row)
    made: list[Setting] = []
    for (name, role, spec, rate, multiple, fresh), held in found.items():
        node = _node(held[0], name=name)
        made.append(_setting(name, held, rate=rate, recipe=node, role=role, spec=spec, multiple=multiple, fresh=fresh))
    return made


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
    """Mean of ours - theirs over shared seeds, and that mean's standard deviation; `sd` is one pair's where known."""
    paired = differences(ours, theirs)
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
        sd = typical_sd([differences(other.value, own.value) for other in cohort.values()])
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
    return sorted(made, key=lambda held: held["change"]["mean"]), reference


# -- rules by role ----------------------------------------------------------------------------------------------------


def best_of_roles(settings: Sequence[Setting]) -> dict[tuple[str, str], Setting]:
    """(role, spec) -> the better of its multiples of the rate by `choice`; none of those that diverged."""
    tried: dict[tuple[str, str], list[Setting]] = defaultdict(list)
    for one in settings:
        if one.role:
            tried[one.role, one.spec].append(one)
    best = {key: min(held, key=lambda one: fmean(one.choice.values())) for key, held in tried.items()}
    return {key: one for key, one in best.items() if all(map(math.isfinite, one.value.values()))}


def entries(settings: Sequence[Setting], base: Setting, *, otherwise: float) -> dict[tuple[str, str], dict[str, Any]]:
    """(role, spec) -> raw change, with the standard deviation that all of them have together, or `otherwise`."""
    best = best_of_roles(settings)
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
    single = best_of_roles(settings)
    found: dict[str, dict[str, Any]] = {}
    own = recipe_from_node(base.recipe)
    for one in settings:
        specs = hidden_specs(one.recipe) if not one.role and not one.fresh and one is not base else set()
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


# -- the file ---------------------------------------------------------------------------------------------------------


def family_of_rows(
    settings: Sequence[Setting], *, base: str | None, about: Mapping[str, Any], unit: float | None = None
) -> dict[str, Any]:
    """A family as the file holds it. `base` is the recipe of which roles were replaced."""
    recipes, reference = wholes([one for one in settings if not one.role], unit=unit)
    bases = [one for one in settings if one.name == base and not one.role and not one.fresh]
    of_base = max(bases, key=lambda one: len(one.value)) if bases and base is not None else None
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


def fit(roles: Sequence[Row], *, product: Sequence[Row] = ()) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for family, unit in UNITS.items():
        own = [row for row in roles if row["task"] == family]
        if own:
            adamw = next(int(row["state_bytes"]) for row in own if row["label"].startswith("adamw_b95"))
            steps = int(own[0]["steps"])
            about = {"unit": unit, "num_params": adamw // 8, "size": own[0]["size"], "steps": steps}
            about["horizon"] = f"{steps} steps, data that hardly repeat"
            made[family] = family_of_rows(settings_of_roles(own, family), base=BASE, about=about, unit=1.0)
            made[family]["weights"] = formats_of(product, family)
    return {"command": "python -m experiments.analysis.fit_measured", "families": rounded(made)}


def rounded(value: Any) -> Any:
    """Floats to six significant digits, of which the last may differ between processors."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(held) for key, held in value.items()}
    return [rounded(held) for held in value] if isinstance(value, list) else value


def text_of(held: Mapping[str, Any]) -> str:
    return json.dumps(held, indent=1) + "\n"


def shipped() -> str:
    """The file as the recorded rows give it."""
    return text_of(fit(read_rows(RESULTS / "role_table.csv"), product=read_rows(RESULTS / "product_runs.csv")))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found = shipped()
    OUT.write_text(found, encoding="utf-8")
    for name, family in json.loads(found)["families"].items():
        print(f"{name}: reference {family['reference']}, {family['size']}, {family['horizon']}")
        for one in family["recipes"]:
            change = one["change"]
            print(
                f"  {one['recipe']['name']:16s} {one['value']:.4f} ({one['sd']:.4f}) {change['mean']:+.4f} "
                f"({change['sd']:.4f}) n {change['n']} rate x{one['rate']:g}"
            )


if __name__ == "__main__":
    main()
