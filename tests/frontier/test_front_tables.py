"""What the records of fronts and of races say: pairs, equal budgets, areas, hypervolumes, on numbers made by hand."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baoc.sweep.study_config import StudyConfig
from baoc.sweep.trial_process import RunOutcome
from experiments.benchmarks import fronts, listed_runs, sampler_held_out, sampler_race
from tests.support.sweep_jobs import job


def row(family: str, *, quality: float, fraction: float, seed: int = 0, **changes: Any) -> dict[str, Any]:
    allocator = {"B": "exact", "r": "random"}.get(family[0], "uniform_sign")
    known = {"model": "vit", "allocator": allocator, "family": family, "budget": "state_10", "seed": seed}
    known |= {"risk": "statistics" if family.startswith("BAOC") else "", "quality_name": "val/loss", "steps": 1}
    bytes_ = {"state_fraction": fraction, "state_bytes": int(1000 * fraction), "peak_bytes": 1}
    return known | bytes_ | {"quality": quality} | changes


ROWS = [
    *(row("BAOC", quality=q, fraction=0.1, seed=s) for s, q in enumerate((0.2, 0.4))),
    *(row("random feasible", quality=q, fraction=0.1, seed=s) for s, q in enumerate((0.3, 0.6))),
    *(row("uniform", quality=0.5, fraction=0.05, seed=s, budget="unlimited") for s in range(2)),
    *(row("uniform", quality=0.1, fraction=1.0, seed=s, budget="unlimited", allocator="uniform_adamw") for s in (0, 1)),
]


def test_pairs_are_of_one_seed():
    found = fronts.paired({0: 1.0, 1: 3.0, 2: 9.0}, {0: 2.0, 1: 1.0})
    assert (found["n"], found["own"], found["difference"]) == (2, 2.0, 0.5)
    assert found["difference_sd"] == pytest.approx(4.5**0.5) and found["t"] == pytest.approx(0.5 / 1.5)
    assert fronts.paired({0: 1.0}, {}) == dict.fromkeys(found, None) | {"n": 0}


def test_rivals_have_the_same_budget():
    told = {r["rival"]: r for r in fronts.equal_budgets(ROWS)}
    assert set(told) == {"random", "uniform_sign"}, "AdamW does not fit"
    assert told["random"]["difference"] == pytest.approx(-0.15)
    assert told["uniform_sign"]["difference"] == pytest.approx(-0.2)
    other = [{**r, "family": "BAOC, prior", "risk": "prior", "quality": r["quality"] + 1} for r in ROWS[:2]]
    both = {(r["risk"], r["rival"]): r["difference"] for r in fronts.equal_budgets([*ROWS, *other])}
    assert len(both) == 5 and both["prior", "BAOC, statistics"] == pytest.approx(1)
    assert both["prior", "random"] == pytest.approx(0.85)


def test_areas_share_one_corner():
    told = {(r["state_axis"], r["family"], r["rival"]): r for r in fronts.areas(ROWS)}
    found = told["share", "BAOC", "random feasible"]
    # corner (.6, 1): seed 0 dominates .1 x .95 (uniform) + .3 x .9 = .365, BAOC .4 x .9; seed 1 .095 + .1 x .9, .2 x .9
    assert found["own"] == pytest.approx(100 * (0.36 / 0.365 + 0.18 / 0.185) / 2)
    assert found["theirs"] == pytest.approx(100 * (0.27 / 0.365 + 0.0) / 2)
    assert not [r for r in fronts.points(ROWS) if r["dominated"] and r["family"] == "BAOC"]


def test_every_task_of_a_race_is_its_sweep_without_early_stops():
    for task in sampler_race.TASKS:
        config = sampler_race.study_config(task, sampler="tpe", seed=3, trials=12)
        assert isinstance(config, StudyConfig) and config.early_stop.rungs == () and config.workers == 1
        assert config.fixed[-1] == "seed=3" and len(config.baselines) == 9 and config.n_trials == 12


def test_hypervolumes_of_a_race_are_shares_of_a_fixed_box():
    costs = [(1.0, 0.5), None, *[(9.0, 0.1)] * 8, (0.5, 1.0), *[None] * 4]
    assert sampler_race.volumes(costs, worst=2.0) == {10: 0.25, 15: 0.25}
    # one of seven doublings on log2
    assert sampler_race.volumes(costs, worst=2.0, axis="log2") == {
        10: pytest.approx(0.5 / 7),
        15: pytest.approx(0.5 / 7),
    }
    found = {("vision", "tpe", 0): {10: 0.5}, ("vision", "random", 0): {10: 0.4}, ("vision", "random", 1): {10: 0.2}}
    first, second = sampler_race.summary(found, reference="random")
    assert (second["sampler"], second["n"], second["better_pairs"]) == ("tpe", 1, 1)
    assert second["difference"] == pytest.approx(0.1) and first["hypervolume"] == pytest.approx(0.3)


def test_fronts_are_scored_by_the_means_of_what_was_trained_again():
    a, b, c = ("a",), ("b",), ("c",)
    fronts_found = {
        ("vision", "tpe", 0): {a: (1.0, 0.5)},
        ("vision", "random", 0): {b: (0.5, 0.5), c: (0.4, 0.9)},
        ("vision", "random", 1): {("not again",): (0.1, 0.1)},
    }
    worst = sampler_race.TASKS["vision"][2]
    again = {("vision", a): worst / 4, ("vision", b): worst / 2, ("vision", c): worst}
    told = sampler_held_out.rows_of(fronts_found, again=again, reference="random")
    row = {(r["state_axis"], r["fronts"], r["sampler"]): r for r in told}["share", "held out", "tpe"]
    assert row["n"] == 1 and row["difference"] == pytest.approx(0.5 * 0.75 - 0.5 * 0.5)
    assert row["points_per_front"] == 1 and all(r["n"] in (0, 1) for r in told)


def test_held_out_means_are_of_the_seeds_that_were_asked_for(tmp_path: Path):
    """A folder may hold more: they are no part of a mean, and no reason to leave the point out."""
    for seed, loss in enumerate((9.0, 0.1, 0.3)):
        job(tmp_path / str(seed), loss=loss, seed=seed, command=f"python run.py model=vit seed={seed}")
    points = {("vision", ("a",)): ["model=vit"], ("vision", ("b",)): ["model=dit"]}
    told = sampler_held_out.means(tmp_path, points=points, seeds=[1, 2])
    assert told == {("vision", ("a",)): pytest.approx(0.2)}
    assert sampler_held_out.means(tmp_path, points=points, seeds=[1, 2, 3]) == {}


def test_a_list_is_held_against_the_first_of_its_group():
    rows = [
        {"group": "g", "label": label, "seed": seed, "status": "finite", "value": value, "state_fraction": 0.1}
        for label, seed, value in (("now", 0, 1.0), ("now", 1, 2.5), ("other", 1, 2.0), ("other", 0, 1.5))
    ]
    bad = {"group": "g", "label": "other", "seed": 2, "status": "diverged", "value": "", "state_fraction": ""}
    first, second = listed_runs.table([*rows, bad])
    assert "n 2" in first and second.split()[-5:] == ["+0", "+-", "6.4", "(n", "2)"]


def test_a_list_runs_seed_by_seed_and_some_lines_last(tmp_path: Path):
    file = tmp_path / "list.tsv"
    file.write_text(f"# told\ng\ta\tdataset.path={{data}}/x y=1\n{listed_runs.LAST}\nh\tb\ty=2\n")
    lines = listed_runs.read_list(file, data=Path("/d"), also=["z=3"])
    assert lines[0].words == ("dataset.path=/d/x", "y=1", "z=3")
    told = [(line.label, seed) for line, seed in listed_runs.ordered(lines, seeds=[7, 8])]
    assert told == [("a", 7), ("a", 8), ("b", 7), ("b", 8)]


def test_a_list_goes_on_with_runs_that_have_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started: list[tuple[str, int, str]] = []

    class Run:
        """Ends at once."""

        def __init__(self, line: listed_runs.Line, seed: int, *, gpu: str, folder: Path, code: str):
            started.append((line.label, seed, gpu))
            self.line, self.seed, self.gpu, self.began, self.process = line, seed, gpu, 0.0, self
            self.process, self.sentinel, self.exitcode = SimpleNamespace(process=self, sentinel=0, poll=self.poll), 0, 2

        def poll(self) -> RunOutcome:
            return RunOutcome(exit_code=2, result=None, message="refused\nhere")

    monkeypatch.setattr(listed_runs, "Running", Run)
    monkeypatch.setattr(listed_runs, "wait", lambda _: None)
    where: dict[str, Any] = {"folder": tmp_path, "rows": (rows := tmp_path / "rows.csv"), "gpus": "01", "per_gpu": 1}
    lines = [listed_runs.Line(group="g", label=label, words=()) for label in "ab"]
    for seeds in ([7], [7, 8]):
        jobs = listed_runs.ordered(lines, seeds=seeds)
        listed_runs.run_all(jobs, **where, minutes=1)
    assert started == [("a", 7, "0"), ("b", 7, "1"), ("a", 8, "0"), ("b", 8, "1")], "each once, on both cards"
    assert [row["status"] for row in listed_runs.read_rows(rows)] == ["refused here"] * 4
    listed_runs.run_all(listed_runs.ordered(lines, seeds=[9]), **where, minutes=0)
    assert len(started) == 4, "past the minutes none starts"
