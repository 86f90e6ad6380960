"""The study of recipes beside tuned AdamW: its runs do not see each other, its table says what its rows say."""

import math
from pathlib import Path

import numpy as np
import pytest

from experiments.analysis.recipe_study import longer, summarise, table
from experiments.benchmarks.recipe_lists import RECIPES
from experiments.benchmarks.recipe_runs import Bench, Job, Options, Row, Slot
from experiments.benchmarks.recipe_tasks import TASKS

STEPS = 3


@pytest.fixture(scope="module")
def fashion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, random = tmp_path_factory.mktemp("fashion") / "fashion_mnist.npz", np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 5100), ("test", 64)):
        arrays[f"{split}_images"] = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"{split}_labels"] = random.integers(0, 10, count, dtype=np.uint8)
    np.savez(path, **arrays)
    return path


def options(fashion: Path) -> Options:
    return Options(
        device="cpu", tasks=tuple(TASKS), recipes=tuple(RECIPES), fashion=fashion, tiny=True, slots=1, end=math.inf
    )


def run(slots: list[Slot], jobs: list[Job]) -> list[Row]:
    """All at once, a step of each by turns."""
    for slot, job in zip(slots, jobs, strict=True):
        slot.start(job)
    rows: dict[Job, Row] = {}
    while len(rows) < len(jobs):
        for slot, job in zip(slots, jobs, strict=True):
            if slot.job is not None and (row := slot.advance()) is not None:
                rows[job] = row
    return [rows[job] for job in jobs]


def test_runs_train_by_turns_as_they_do_alone(fashion: Path) -> None:
    bench = Bench(options(fashion))

    def slots(count: int) -> list[Slot]:
        plain = dict.fromkeys(TASKS, False)
        return [Slot(bench, graphed=plain, steps=dict.fromkeys(TASKS, STEPS)) for _ in range(count)]

    recipes = ("muon8_lean", "foam8_lean", "planned10")
    jobs = [Job("short", task, recipe, 0.95, 2.0, 100, STEPS) for task, recipe in zip(TASKS, recipes, strict=True)]
    together = run(slots(3), jobs)
    (alone,) = slots(1)
    told = [row for job in jobs for row in run([alone], [job])]
    told += [row for job in jobs for row in run([alone], [job])]  # and where a run was before
    for first, *others in zip(together, told[:3], told[3:], strict=True):
        for name in ("value", "choice", "value_25", "choice_50", "state_bytes", "nonfinite"):
            assert {getattr(other, name) for other in others} == {getattr(first, name)}
    language, diffusion, vision = together
    assert math.isfinite(language.value) and diffusion.status == "finite" and 0 <= vision.accuracy <= 1
    assert language.value_25 != language.value_50 != language.value != language.choice
    assert diffusion.state_fraction < 0.25 and vision.state_fraction <= 0.1


def row(
    recipe: str, factor: float, seed: int, choice: float, value: float, *, status: str = "finite"
) -> dict[str, str]:
    told = {"phase": "short", "task": "language", "recipe": recipe, "beta2": 0.95, "factor": factor, "seed": seed}
    told |= {"choice": choice, "value": value, "status": status, "lr": factor * 2e-3, "accuracy": math.nan}
    return {name: str(entry) for name, entry in {**told, "state_fraction": 1.0}.items()}


ROWS = [
    *(
        row("adamw", factor, seed, 2 + abs(factor - 1), 2.0 + seed / 10)
        for factor in (0.5, 1.0, 2.0)
        for seed in (1, 2)
    ),
    *(row("low", factor, seed, 3 - factor / 10, 1.5 + seed / 10) for factor in (0.5, 1.0, 2.0) for seed in (1, 2)),
    *(row("bad", factor, seed, 0.1, 9.0, status="diverged") for factor in (0.5, 1.0) for seed in (1, 2)),
    *(row("bad", 2.0, seed, 7.0, 7.0) for seed in (1, 2)),
    row("low", 2.0, 3, 0.0, 0.0),  # of a seed that was cut
]


def test_the_table_takes_each_recipe_at_the_rate_that_other_data_chose() -> None:
    told = {line["recipe"]: line for line in summarise(ROWS)}
    assert [told[recipe]["factor"] for recipe in ("adamw", "low", "bad")] == [1.0, 2.0, 2.0]
    assert [told[recipe]["edge"] for recipe in ("adamw", "low", "bad")] == [False, True, True]
    assert told["low"]["n"] == 2 and told["low"]["value"] == 1.65 and told["bad"]["failed"] == 4
    assert told["low"]["difference"] == -0.5 and told["low"]["half_width"] == 0 and told["low"]["better"] == 2
    assert "this decides nothing" in table(summarise(ROWS))
    assert "no table" in table(summarise([row("adamw", 1.0, 1, 1, 1), row("low", 1.0, 2, 1, 1)]))


def test_an_interval_is_students() -> None:
    rows = [row("adamw", 1.0, seed, 1, 1.0) for seed in (1, 2, 3)]
    rows += [row("low", 1.0, seed, 1, 1.0 + seed) for seed in (1, 2, 3)]
    told = summarise(rows)[1]
    assert told["difference"] == 2 and told["half_width"] == pytest.approx(2.91999 / math.sqrt(3), abs=1e-4)


def test_the_long_phase_takes_neighbours_of_the_best_rate() -> None:
    assert longer(ROWS, recipes=1, rates=2) == [
        ("language", "adamw", 0.95, 0.5),
        ("language", "adamw", 0.95, 1.0),
        ("language", "low", 0.95, 1.0),
        ("language", "low", 0.95, 2.0),
    ]
    assert {recipe for _, recipe, _, _ in longer(ROWS)} == {"adamw", "low", "bad"}
