"""What the rows of benchmarks/role_study.py say, by task: whole recipes, roles, mixtures, confirmation, long runs.

    python -m experiments.analysis.role_table  # seconds -> printed

`value`, of data that chose nothing, is told. Intervals are 90 % (Student's t) of differences paired by seed, 95 % where
a choice is held against others; those of roles have the sd of all role rows of the task pooled, as one has one or two
seeds.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean

from baoc.core.statistics import Interval, mean_interval, paired_difference
from experiments.analysis.allocation_pairs import told_of
from experiments.analysis.ranks import rank_correlation
from experiments.benchmarks import shared
from experiments.benchmarks.recipe_lists import BUDGETS, CONFIRM_WHOLE

RESULTS = Path(__file__).resolve().parents[1] / "results" / "role_table.csv"
LEVEL = 0.90
Row = Mapping[str, str]


def read_rows(path: Path) -> list[Row]:
    return [row for row in shared.read_rows(path) if row["status"] == "finite"]


def by_seed(rows: Sequence[Row], column: str = "value") -> dict[str, dict[int, float]]:
    """Label -> seed -> figure."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        found.setdefault(row["label"], {})[int(row["seed"])] = float(row[column])
    return found


def best_rates(rows: Sequence[Row]) -> list[str]:
    """Each recipe at the rate with the least mean of `choice`; the multiple of AdamW's best rate is its own."""
    values, choices, shares = by_seed(rows), by_seed(rows, "choice"), _shares(rows)
    whole = max(map(len, choices.values()), default=0)
    best: dict[str, str] = {}
    for label, seeds in choices.items():
        name = label.partition("@")[0]
        if len(seeds) == whole and mean(seeds.values()) < mean(choices.get(best.get(name, ""), {0: 9e9}).values()):
            best[name] = label
    factor = {name: float(label.partition("@")[2]) for name, label in best.items()}
    lines = [f"  {'recipe':16s} {'state':>6s} {'factor':>6s} {'of AdamW':>8s} {'choice':>8s} {'value':>8s}"]
    for name, label in sorted(best.items(), key=lambda item: mean(choices[item[1]].values())):
        lines.append(
            f"  {name:16s} {shares[label]:6.1%} {factor[name]:6g} {factor[name] / factor['adamw']:8g} "
            f"{mean(choices[label].values()):8.4f} {mean(values[label].values()):8.4f}"
        )
    return lines


def roles(rows: Sequence[Row]) -> list[str]:
    """Replaced roles at the better of their rates, against the base."""
    base = _base(rows)
    half = pooled_half(rows)
    table: dict[tuple[str, str], tuple[float, str, int]] = {}
    for row in {row["label"]: row for row in rows if row["phase"] == "roles" and row["role"]}.values():
        own = _differences(rows, row["label"], base)
        key = (row["role"], row["spec"])
        if key not in table or mean(own) < table[key][0]:
            table[key] = (mean(own), row["factor"], len(own))
    lines = []
    for role in dict.fromkeys(role for role, _ in table):
        entries = sorted((entry, spec) for (own, spec), entry in table.items() if own == role)
        told = ", ".join(f"{spec} {difference:+.4f} (x{factor})" for (difference, factor, _), spec in entries)
        lines.append(f"  {role}: {told}")
    return [f"  minus the base {mean(base.values()):.4f}; +- {half:.4f} each, n {len(base)}", *lines]


def pooled_half(rows: Sequence[Row]) -> float:
    """Half of the interval of a role's difference: from two seeds by their spread, else from norms, whose rules cannot
    matter much."""
    base = _base(rows)
    labels = {row["label"] for row in rows if row["phase"] == "roles" and row["role"]}
    pairs = [own for label in labels if len(own := _differences(rows, label, base)) > 1]
    if pairs:
        sds = [mean_interval(own, level=LEVEL).sd for own in pairs]
        sd = mean(one**2 for one in sds) ** 0.5
    else:
        norms = {row["label"] for row in rows if row["role"] == "norm"}
        found = [own for label in norms for own in _differences(rows, label, base)]
        sd = mean(one**2 for one in found) ** 0.5
    return 1.645 * sd / len(base) ** 0.5


def whole(rows: Sequence[Row]) -> list[str]:
    base = _base(rows)
    lines: list[tuple[float, str]] = []
    shares = _shares(rows)
    for label in {row["label"]: 0 for row in rows if row["phase"] == "whole"}:
        own = _differences(rows, label, base)
        lines.append((mean(own), f"  {label:16s} {shares[label]:6.1%} {mean(own):+.4f} (n {len(own)})"))
    return [line for _, line in sorted(lines)]


def additivity(rows: Sequence[Row]) -> list[str]:
    """Mixtures against the sum of their roles' own differences at the same rates."""
    base = _base(rows)
    single: dict[tuple[str, str, float], float] = {}
    for row in rows:
        if row["phase"] == "roles" and row["role"]:
            key = (row["role"], row["spec"], float(row["factor"]))
            single[key] = mean(_differences(rows, row["label"], base))
    predicted, measured = [], []
    specs_of_base = json.loads(next(row for row in rows if row["label"] == "base")["recipe"])
    for row in {row["label"]: row for row in rows if row["phase"] == "mixture"}.values():
        multiples = json.loads(row["multiples"])
        parts = [
            0.0 if spec == specs_of_base.get(role) and multiples.get(role, 1.0) == 1.0
            else single.get((role, spec, float(multiples.get(role, 1.0))))
            for role, spec in json.loads(row["recipe"]).items()
        ]  # fmt: skip
        known = [part for part in parts if part is not None]
        if len(known) == len(parts):
            predicted.append(sum(known))
            measured.append(mean(_differences(rows, row["label"], base)))
    if len(predicted) < 3:
        return [f"  {len(predicted)} mixtures of known roles: not told"]
    ratio = sum(p * m for p, m in zip(predicted, measured, strict=True)) / sum(p * p for p in predicted)
    told = rank_correlation(predicted, measured)
    off = mean(abs(m - p) for p, m in zip(predicted, measured, strict=True))
    return [
        f"  {len(predicted)} mixtures: measured = {ratio:.2f} x sum of roles, mean error of the plain sum {off:.4f}, "
        f"Spearman {told.rho:+.2f} (p {told.p:.3f})"
    ]


def confirmed(rows: Sequence[Row]) -> list[str]:
    """Against AdamW at the best of its five rates by `choice` on these seeds, which favours AdamW."""
    return against(rows, reference=lambda label: label.startswith("adamw@"))


def against(rows: Sequence[Row], *, reference: Callable[[str], bool]) -> list[str]:
    values, choices, shares = by_seed(rows), by_seed(rows, "choice"), _shares(rows)
    if not values:
        return []
    best = min((label for label in choices if reference(label)), key=lambda label: mean(choices[label].values()))
    lines = [(-9.0, f"  {best}: {mean(values[best].values()):.4f} (n {len(values[best])})")]
    for label, own in values.items():
        told = paired_difference(own, values[best], level=LEVEL)
        better = sum(own[seed] < values[best][seed] for seed in own)
        lines.append(
            (
                told.mean,
                f"  {label:20s} {shares[label]:6.1%} {mean(own.values()):8.4f} {shown(told)}, better in {better}",
            )
        )
    return [line for _, line in sorted(lines)]


def pairs(rows: Sequence[Row]) -> list[str]:
    """What was chosen at each budget against what else fits, and Muon's two momenta, on the same seeds."""
    values, shares = by_seed(rows), _shares(rows)
    lines = []
    for budget in BUDGETS:
        # A choice that equals a whole recipe ran once, under the recipe's name.
        chosen = f"choice_{budget}" if f"choice_{budget}" in values else "muon8_lean_m90"
        others = [label for label in (*CONFIRM_WHOLE, f"random_{budget}") if label in values and label != chosen]
        for label in others:
            if shares[label] <= budget / 100 and not (label.startswith("muon8_lean") and chosen != "muon8_lean_m90"):
                lines.append(f"  {budget} %: {chosen} - {label} {told_of(values[chosen], values[label])}")
    for label in values:
        if label.startswith("permuted_"):
            own = f"choice_{label.removeprefix('permuted_')}"
            lines.append(f"  {own} - {label} {told_of(values[own], values[label])}")
    lines.append(f"  momentum .9 - .95: muon8_lean {told_of(values['muon8_lean_m90'], values['muon8_lean'])}")
    return lines


def shown(told: Interval) -> str:
    return f"{told.mean:+.4f}" + (f" +- {told.half:.4f}, n {told.n}" if told.n > 1 else ", n 1")


def _base(rows: Sequence[Row]) -> dict[int, float]:
    return by_seed([row for row in rows if row["phase"] == "roles"])["base"]


def _differences(rows: Sequence[Row], label: str, base: Mapping[int, float]) -> list[float]:
    own = {int(row["seed"]): float(row["value"]) for row in rows if row["label"] == label and row["phase"] != "rates"}
    return [own[seed] - base[seed] for seed in own if seed in base]


def _shares(rows: Sequence[Row]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["label"], []).append(float(row["state_fraction"]))
    return {label: mean(shares) for label, shares in found.items()}


PARTS: Mapping[str, tuple[tuple[str, ...], Callable[[Sequence[Row]], list[str]]]] = {
    "whole recipes at their best rates, seeds that chose them": (("rates",), best_rates),
    "one role replaced": (("roles",), roles),
    "whole recipes minus the base": (("roles", "whole"), whole),
    "are roles additive?": (("roles", "mixture"), additivity),
    "on seeds that chose nothing, minus AdamW at its best of five rates": (("confirm",), confirmed),
    "what was chosen against what else fits, on the same seeds": (("confirm",), pairs),
    "eight times the steps, minus AdamW at its best rate": (("long",), confirmed),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="?", default=RESULTS)
    rows = read_rows(parser.parse_args().rows)
    for task in dict.fromkeys(row["task"] for row in rows):
        for title, (phases, tell) in PARTS.items():
            own = [row for row in rows if row["task"] == task and row["phase"] in phases]
            if {row["phase"] for row in own} == set(phases):
                print(f"{task}: {title}", *tell(own), sep="\n")


if __name__ == "__main__":
    main()
