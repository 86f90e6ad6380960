"""How well does predicted risk rank the measured damage of runs in a folder?

    python -m experiments.analysis.calibrate FOLDER  # seconds -> printed

`--write NAME` writes the best weights of a risk_weights study to conf/risk/NAME.yaml with their evidence, for use as
risk=NAME. `--fit NAME` writes the weights that explain the runs' damage best, if they also rank runs of held-out seeds.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna.trial import FrozenTrial, TrialState
from rich.table import Table

from baoc.config import assets
from baoc.config.environment import commit
from baoc.core.commands import Arguments, command
from baoc.core.statistics import Interval, paired_difference
from baoc.errors import BadInputError
from baoc.frontier.runs import find_runs
from baoc.planning.risk import RISKS
from baoc.sweep.early_stopping import violates_constraint
from baoc.sweep.status import load_study
from baoc.tracking.console import make_console, say
from baoc.tracking.files import read_json, write_csv, write_text
from experiments.analysis.damage import LEAST_RUNS, Damage, Rank, damages, fit, held_out, ranks

WEIGHT = "risk.weights."
UNIT_WEIGHTS = "weights of 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Winner:
    """The best trial of a risk_weights study against the one with weights of 1, paired by run (budget and seed).
    `difference` is winner - unit: negative is better for a minimised objective."""

    trial: int
    weights: Mapping[str, float]
    quality: float
    unit_trial: int
    unit_quality: float
    difference: Interval  # of 95 %, which is no proof where it excludes 0, since the winner is selected
    num_trials: int


def winner_of(study: optuna.Study, *, folder: Path) -> Winner:
    """Raises BadInputError if the study searches no weights, or its trial with weights of 1 has not finished."""
    done = [t for t in study.get_trials(states=(TrialState.COMPLETE,)) if not violates_constraint(t)]
    searched = [t for t in done if any(key.startswith(WEIGHT) for key in t.params)]
    if not searched:
        raise BadInputError(
            f"study {study.study_name} has no finished trial that searched {WEIGHT}*: start sweeps=risk_weights_vision"
        )
    unit = next((t for t in done if t.user_attrs.get("overrides") == []), None)
    if unit is None:
        raise BadInputError(
            f"study {study.study_name} has no finished trial with weights of 1 (the baseline []), which a winner is "
            "held against"
        )
    sign = 1.0 if study.directions[0].name == "MINIMIZE" else -1.0
    best = min(searched, key=lambda t: sign * t.values[0])
    overrides = [word.partition("=") for word in best.user_attrs["words"] if word.startswith(WEIGHT)]  # as run: rounded
    mine, other = (dict(enumerate(_qualities(folder, trial))) for trial in (best, unit))
    return Winner(
        trial=best.number,
        weights={key.removeprefix(WEIGHT): float(value) for key, _, value in overrides},
        quality=best.values[0],
        unit_trial=unit.number,
        unit_quality=unit.values[0],
        difference=paired_difference(mine, other, level=0.95),
        num_trials=len(searched),
    )


def _qualities(folder: Path, trial: FrozenTrial) -> list[float]:
    """Qualities of a trial's runs, in the order of `repeats`."""
    own = folder / f"{trial.number:04d}"
    found = sorted(own.glob("*/result.json"), key=lambda file: int(file.parent.name)) or [own / "result.json"]
    return [float(read_json(file)["quality"]["value"]) for file in found]


def risk_file(winner: Winner, *, study: optuna.Study, model: str, found: Sequence[Rank]) -> str:
    """The text of conf/risk/NAME.yaml: weights of all terms of `model`, with their origin."""
    defaults = yaml.safe_load(assets.option_files("risk")[model].read_text(encoding="utf-8"))
    weights = {term: float(winner.weights.get(term, weight)) for term, weight in defaults["weights"].items()}
    lower = "lower than with" if winner.difference.mean < 0 else "higher than with"
    comparison = lower if winner.difference.excludes_zero else "not distinguishable from"
    lines = [
        f"# Weights of risk={model} that were the best of {winner.num_trials} in study {study.study_name}",
        f"# Evidence (commit {commit() or 'unknown'}): trial {winner.trial} has quality {winner.quality:.4g}, weights",
        f"# of 1 have {winner.unit_quality:.4g}; paired difference {winner.difference}, 95 %:",
        f"# {comparison} weights of 1.",
        "# The best of many looks better than it is; n are its budgets and seeds, which it was chosen by.",
    ]
    lines += [f"# Rank correlation with damage, {r.what}: {r}" for r in found if r.what.startswith("total")]
    return "\n".join(lines) + "\n" + yaml.safe_dump({"name": model, "weights": weights}, sort_keys=False)


def show(found: Sequence[Rank]) -> None:
    """Prints the table of rank correlations. `p` is the probability of one as large in size by chance."""
    table = Table(title="Rank correlation with damage (Spearman; p by permuting runs)", title_justify="left")
    for column in ("predicted by", "rho", "p", "runs", "known at 5 %"):
        table.add_column(column)
    for rank in found:
        table.add_row(rank.what, f"{rank.rho:+.2f}", f"{rank.p:.2g}", str(rank.n), "yes" if rank.known else "no")
    make_console().print(table)


def calibrate(
    folders: Sequence[Path], *, write: str | None = None, fitted: str | None = None, storage: str | None = None
) -> list[Rank]:
    """Ranks the runs below `folders`.

    Args:
        write: name under which the winner of the first folder's study is written to conf/risk.
        fitted: name under which the fitted weights are written.
        storage: URL of the study's storage, if it has a password.
    """
    winner, study = None, None
    if write is not None:
        study, _, _ = load_study(folders[0], storage=storage)
        winner = winner_of(study, folder=folders[0])
    weight_sets: dict[str, Mapping[str, float]] = {UNIT_WEIGHTS: {}}
    if winner is not None:
        weight_sets["weights of the winner"] = winner.weights
    runs = [run for folder in folders for run in find_runs(folder)]
    found: list[Rank] = []
    try:
        found = ranks_by_model(damages(runs), weights=weight_sets)
        show(found)
    except BadInputError as error:
        if winner is None:
            raise
        say(f"risk was not ranked: {error}")
    if fitted is not None:
        _save_fit(damages(runs), name=fitted)
    if winner is not None and study is not None:
        _save_winner(winner, study=study, name=str(write), runs=runs, found=found)
    return found


def ranks_by_model(found: Sequence[Damage], *, weights: Mapping[str, Mapping[str, float]]) -> list[Rank]:
    """`ranks` for the runs of each risk model, since terms of different models are in different units."""
    models = sorted({run.risk_model for run in found})
    groups = {model: [run for run in found if run.risk_model == model] for model in models}
    large_enough = {model: group for model, group in groups.items() if len(group) >= LEAST_RUNS}
    if len(models) < 2 or not large_enough:
        return _with_held_out(found, weights=weights)
    every = [(model, rank) for model, group in large_enough.items() for rank in _with_held_out(group, weights=weights)]
    return [replace(rank, what=f"{rank.what} ({model})") for model, rank in every]


def _with_held_out(found: Sequence[Damage], *, weights: Mapping[str, Mapping[str, float]]) -> list[Rank]:
    by_weights, fitted = ranks(found, weights=weights), held_out(found)
    return by_weights if fitted is None else [*by_weights, fitted]


def fitted_file(found: Sequence[Damage]) -> str:
    """The text of a conf/risk file with fitted weights and their evidence, for runs of one risk model. Raises
    BadInputError if they do not rank runs of held-out seeds better than weights of 1."""
    models = sorted({run.risk_model for run in found})
    if len(models) != 1:
        raise BadInputError(f"weights are fitted to runs of one risk model, and these have {', '.join(models)}")
    fitted, unit, weights = held_out(found), f"total, {UNIT_WEIGHTS}, at equal budgets", fit(found)
    plain = next((rank for rank in ranks(found, weights={UNIT_WEIGHTS: {}}) if rank.what == unit), None)
    if fitted is None or plain is None or not weights:
        raise BadInputError(
            "weights cannot be fitted: that needs several runs at each budget, of at least two seeds, whose risk goes "
            "with their damage (allocator=random at a few budgets)"
        )
    if not (fitted.known and fitted.rho > max(plain.rho, 0.0)):
        raise BadInputError(
            f"fitted weights rank runs of held-out seeds at equal budgets by {fitted}, weights of 1 by "
            f"{plain}: that is no better, so nothing was written"
        )
    file = yaml.safe_load(assets.option_files("risk")[models[0]].read_text(encoding="utf-8"))
    merged = {term: round(weights.get(term, float(weight)), 4) for term, weight in file["weights"].items()}
    lines = [
        f"# Weights of risk={models[0]} fitted to the damage of {len(found)} runs (commit {commit() or 'unknown'}).",
        f"# Rank correlation with damage at equal budgets: {fitted} on seeds that were held out,",
        f"# weights of 1 {plain}. A term that did not vary keeps its weight.",
    ]
    return "\n".join(lines) + "\n" + yaml.safe_dump({"name": models[0], "weights": merged}, sort_keys=False)


def _save_fit(found: Sequence[Damage], *, name: str) -> None:
    text = fitted_file(found)
    if name in RISKS:
        raise BadInputError(f"--fit {name} would overwrite that risk model: choose a name of its own")
    file = assets.conf() / "risk" / f"{name}.yaml"
    write_text(file, text)
    say(
        f"fitted weights are in {file}: use them as risk={name}. Better ranks are not better plans yet: hold them "
        "against weights of 1 on other seeds"
    )


def _save_winner(winner: Winner, *, study: optuna.Study, name: str, runs: Sequence[Any], found: Sequence[Rank]) -> None:
    model = next(str(run.result["risk"]) for run in runs if run.result is not None)
    if name in RISKS:
        raise BadInputError(f"--write {name} would overwrite that risk model: choose a name of its own")
    file = assets.conf() / "risk" / f"{name}.yaml"
    write_text(file, risk_file(winner, study=study, model=model, found=found))
    say(
        f"trial {winner.trial}: {winner.quality:.4g}, weights of 1: {winner.unit_quality:.4g}, paired difference "
        f"{winner.difference}, 95 %; written to {file}: use it as risk={name}"
    )


@command
def main(argv: Arguments = None) -> None:
    """Returns exit code 0, or 2 if there are too few runs."""
    parser = argparse.ArgumentParser(prog="python -m experiments.analysis.calibrate", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help=f"runs, {LEAST_RUNS} at least")
    parser.add_argument("--write", metavar="NAME", help="write the winner of the first folder's study")
    parser.add_argument("--fit", metavar="NAME", help="write weights fitted to the damage of the runs")
    parser.add_argument("--storage", help="the study's storage, where its URL has a password")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="the correlations as CSV")
    given = parser.parse_args(argv)
    found = calibrate(given.folders, write=given.write, fitted=given.fit, storage=given.storage)
    if given.csv is not None:
        write_csv(given.csv, [asdict(rank) for rank in found])


if __name__ == "__main__":
    sys.exit(main())
