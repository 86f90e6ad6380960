"""The frontier of a folder: seeds are joined, points are named by what differs, failed jobs keep their reason."""

import csv
import shutil
from pathlib import Path

import pytest
import yaml

from baoc.errors import BadInputError
from baoc.frontier.build import write_frontier
from baoc.frontier.runs import find_runs, setting_labels
from baoc.tracking.files import write_json
from baoc.types import Quality
from tests.support.sweep_jobs import config, error, job


def rows(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "frontier.csv").read_text().splitlines()))


def test_runs_by_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(tmp_path / "0_a", loss=0.10, budget="state_50", state_bytes=50)
    job(tmp_path / "1_b", loss=0.12, budget="state_25", state_bytes=25)
    job(tmp_path / "2_c", loss=0.15, budget="state_10", state_bytes=60)
    found = write_frontier(tmp_path)
    (frontier,) = found.frontiers
    assert {p.label: p.dominated for p in frontier.points} == {
        "budget=state_50": False,
        "budget=state_25": False,
        "budget=state_10": True,
    }
    assert [row["label"] for row in rows(tmp_path)] == ["budget=state_50", "budget=state_25", "budget=state_10"]
    assert [row["dominated"] for row in rows(tmp_path)] == ["False", "False", "True"]
    assert rows(tmp_path)[0]["quality_name"] == "val/loss"
    out = capsys.readouterr().out
    assert "Frontier of vision, vit, digits" in out and out.count("budget=") == 3


def test_weights_of_risk_are_told_where_they_are_not_1(tmp_path: Path) -> None:
    for folder, weight in (("0", 1.0), ("1", 5.0)):
        given = config(seed=0, budget=f"state_{folder}", allocator="exact") | {"risk": {"weights": {"drop_m": weight}}}
        job(tmp_path / folder, loss=0.1, settings=given)
    (frontier,) = write_frontier(tmp_path, show=False).frontiers
    assert [p.label for p in frontier.points] == ["budget=state_0", "budget=state_1 risk.weights.drop_m=5.0"]


def test_seeds_are_one_point_and_other_settings_are_not(tmp_path: Path) -> None:
    for seed, loss in enumerate((0.1, 0.2, 0.3)):
        job(tmp_path / f"{seed}_x", loss=loss, seed=seed, state_bytes=100 + seed)
    other = config(seed=0, budget="state_50", allocator="exact", optim={"lr": 0.1, "betas": [0.9, 0.999]})
    job(tmp_path / "3_lr", loss=0.4, settings=other)
    job(tmp_path / "5_the_baseline_of_another_study", loss=0.9, settings=other)
    job(tmp_path / "4_lr", loss=0.5, settings=other | {"optim": {"lr": None, "betas": [0.9, 0.999]}})
    (frontier,) = write_frontier(tmp_path, show=False).frontiers
    mean, lone, default = frontier.points
    assert default.label == "optim.lr=null", "as a command line has it"
    assert (mean.label, mean.num_seeds, mean.state_bytes) == ("optim.lr=0.003", 3, 102)
    assert mean.quality == pytest.approx(0.2)
    assert mean.quality_spread == pytest.approx(0.1)
    assert mean.run == "0_x 1_x 2_x"
    assert (lone.label, lone.num_seeds, lone.quality_spread) == ("optim.lr=0.1", 1, None)


def test_higher_may_be_better(tmp_path: Path) -> None:
    for index, accuracy in enumerate((0.9, 0.95)):
        quality = Quality(name="val/acc", value=accuracy, higher_is_better=True)
        job(tmp_path / f"{index}_x", loss=0, budget=f"state_{index + 10}", quality=quality)
    (frontier,) = write_frontier(tmp_path, show=False).frontiers
    assert [p.dominated for p in frontier.points] == [True, False]


def test_peak_bytes_count_as_state_bytes_do(tmp_path: Path) -> None:
    job(tmp_path / "0_x", loss=0.1, budget="state_50", state_bytes=50, peak_bytes=2000)
    job(tmp_path / "1_x", loss=0.1, budget="state_25", state_bytes=60, peak_bytes=1000)
    (frontier,) = write_frontier(tmp_path, show=False).frontiers
    assert [p.dominated for p in frontier.points] == [False, False]


def test_failed_and_unfinished_jobs_are_rows_with_their_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job(tmp_path / "0_x", loss=0.1)
    error(tmp_path / "1_y", exit_code=3, message="budget state_1 cannot be met\nand more")
    (tmp_path / "2_z").mkdir()
    (tmp_path / "2_z" / "config.yaml").write_text(yaml.safe_dump(config(seed=0, budget="state_10", allocator="exact")))
    found = write_frontier(tmp_path)
    assert [(f.run, f.label, f.exit_code) for f in found.failed] == [
        ("1_y", "1_y", 3),
        ("2_z", "budget=state_10", None),
    ]
    out = capsys.readouterr().out
    assert "\n1_y, exit code 3: budget state_1 cannot be met" in out
    assert "budget=state_10 (2_z), not finished: it still runs or was killed" in out
    good, first, second = rows(tmp_path)
    assert (good["label"], good["exit_code"], good["message"]) == ("budget=state_50", "0", "")
    assert (first["run"], first["exit_code"], first["message"]) == ("1_y", "3", "budget state_1 cannot be met and more")
    assert (second["quality"], second["exit_code"]) == ("", "")


def test_a_run_that_breached_its_budget_has_its_point_and_its_reason(tmp_path: Path) -> None:
    job(tmp_path / "0_x", loss=0.1, budget_met=False)
    error(tmp_path / "0_x", exit_code=4, message="held more")
    found = write_frontier(tmp_path, show=False)
    assert len(found.frontiers[0].points) == 1
    assert [(f.exit_code, f.message) for f in found.failed] == [(4, "held more")]


def test_a_single_run_has_a_frontier_of_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(tmp_path / "run", loss=0.1)
    write_frontier(tmp_path / "run", show=False)
    (row,) = rows(tmp_path / "run")
    assert (row["run"], row["label"], row["dominated"]) == ("run", "budget=state_50", "False")
    assert capsys.readouterr().out == ""


def test_folders_inside_a_run_are_no_runs(tmp_path: Path) -> None:
    job(tmp_path / "run", loss=0.1)
    for inside in (".hydra", "wandb/run-1/files"):
        (tmp_path / "run" / inside).mkdir(parents=True)
        (tmp_path / "run" / inside / "config.yaml").write_text("a: 1")
    assert write_frontier(tmp_path / "run", show=False).failed == ()


def test_kinds_are_kept_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(tmp_path / "0_x", loss=0.1)
    job(tmp_path / "1_x", loss=0.2, model="dit", task="diffusion")
    other = config(seed=0, budget="state_50", allocator="exact", dataset={"name": "fashion", "path": None})
    job(tmp_path / "2_x", loss=0.3, settings=other)
    found = write_frontier(tmp_path)
    assert len(found.frontiers) == 3
    assert not any(p.dominated for frontier in found.frontiers for p in frontier.points)
    assert "Frontier of vision, vit, fashion" in capsys.readouterr().out


def test_runs_of_several_tasks_are_named_by_what_differs_inside_their_own(tmp_path: Path) -> None:
    """A model brings its task, data and batch along: these are in the title, not in every name."""
    brought = {"vision": ("vit", 64, {"mixup": 0.0}), "language": ("llama", 16, {"loss_chunk": 0})}
    for task, (model, batch_size, options) in brought.items():
        for number, (budget, seed) in enumerate([("state_50", 0), ("state_25", 0), ("state_25", 1)]):
            settings = config(seed=seed, budget=budget, allocator="exact", batch_size=batch_size)
            settings |= {"task": {"name": task, **options}, "model": {"name": model}, "dataset": {"name": task}}
            job(tmp_path / f"{number}_{task}", loss=0.1, seed=seed, settings=settings, task=task, model=model)
    write_frontier(tmp_path, show=False)
    named = sorted((row["task"], row["label"], row["num_seeds"]) for row in rows(tmp_path))
    assert named == [
        (task, label, seeds)
        for task in ("language", "vision")
        for label, seeds in (("budget=state_25", "2"), ("budget=state_50", "1"))
    ]


def test_a_diverged_run_is_dominated_not_lost(tmp_path: Path) -> None:
    job(tmp_path / "0_x", loss=float("nan"), budget="state_10", state_bytes=1)
    job(tmp_path / "1_x", loss=0.1, budget="state_50")
    (frontier,) = write_frontier(tmp_path, show=False).frontiers
    assert [(p.label, p.dominated) for p in frontier.points] == [("budget=state_10", True), ("budget=state_50", False)]


def test_budgets_of_one_name_are_told_apart_by_their_limits(tmp_path: Path) -> None:
    for index, fraction in enumerate((0.5, 0.4)):
        settings = config(seed=0, budget="state_50", allocator="exact")
        settings["budget"]["state_fraction"] = fraction
        job(tmp_path / f"{index}_x", loss=0.1, settings=settings)
    (frontier,) = write_frontier(tmp_path, show=False).frontiers
    assert [p.label for p in frontier.points] == ["budget.state_fraction=0.5", "budget.state_fraction=0.4"]


def test_jobs_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for index in (10, 2, 1):
        job(tmp_path / f"{index}_x", loss=0.1, budget=f"state_{index}", state_bytes=index)
    (frontier,) = write_frontier(tmp_path, show=False).frontiers
    assert [p.run for p in frontier.points] == ["1_x", "2_x", "10_x"]


def test_results_without_their_settings_are_told_by_the_result(tmp_path: Path) -> None:
    for index, allocator in enumerate(("exact", "random")):
        job(tmp_path / f"{index}_x", loss=0.1, allocator=allocator)
        (tmp_path / f"{index}_x" / "config.yaml").unlink()
    (frontier,) = write_frontier(tmp_path, show=False).frontiers
    assert [p.label for p in frontier.points] == ["allocator=exact", "allocator=random"]


def test_bad_folders_are_said(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"there is no run in .*: give the folder of a run or of a multirun"):
        write_frontier(tmp_path)
    job(tmp_path / "0_x", loss=0.1, schema=2)
    with pytest.raises(BadInputError, match="has schema 2, and this version of baoc reads up to 1: upgrade baoc"):
        write_frontier(tmp_path)
    (tmp_path / "0_x" / "result.json").write_text('{"half": ')
    with pytest.raises(BadInputError, match=r"result\.json is not JSON"):
        write_frontier(tmp_path)


@pytest.mark.parametrize("text", ["/a/b-1.2", "/a b/\u00fc", "it's", "a,b={c}", "x\\'y", "tail\\", "a\\b", "-1e3"])
def test_a_label_is_read_back_by_hydra(text: str, tmp_path: Path) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    given = [text, [text, "true", "4gb", 2, True, None, {"a": [text, 0.5]}]]
    for number, value in enumerate(given):
        settings = {"dataset": {"name": "d", "path": value}}
        job(tmp_path / str(number), loss=0.1, settings=settings)
    labels = setting_labels(find_runs(tmp_path))
    assert [OverridesParser.create().parse_override(label).value() for label in labels] == given


def test_an_earlier_default_of_blocks_is_no_difference_and_one_that_was_given_is(tmp_path: Path) -> None:
    for name, by, words in (("0", "layer_role", ""), ("1", "auto", ""), ("2", "layer_role", " blocks=layer_role")):
        settings = config(seed=0, budget="state_50", allocator="exact", blocks={"by": by, "patterns": []})
        job(tmp_path / name, loss=0.1, settings=settings, command=f"python run.py model=vit{words}")
        error(failed := tmp_path / f"{name}_failed", exit_code=5, message="m")
        (failed / "config.yaml").write_text(yaml.safe_dump(settings))
        write_json(failed / "env.json", {"command": f"python run.py model=vit{words}"})
    ways = {run.name: run.settings["blocks.by"] for run in find_runs(tmp_path)}
    assert list(ways.values()) == ["auto"] * 4 + ["layer_role"] * 2, ways
    for name in ("0", "1"):
        shutil.rmtree(tmp_path / f"{name}_failed")
    assert setting_labels(find_runs(tmp_path)[:2]) == ["budget=state_50"] * 2


def test_the_folder_of_a_race_and_of_a_plan_is_no_run_that_did_not_finish(tmp_path: Path) -> None:
    for name, mode in ((".", "race"), ("plan", "plan"), ("killed", "train"), ("failed", "race")):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump({"mode": mode}))
    error(tmp_path / "failed", exit_code=3, message="no recipe fits")
    job(tmp_path / "0000", loss=0.1)
    found = write_frontier(tmp_path, show=False, page=False)
    assert [run.run for run in found.failed] == ["failed", "killed"] and len(find_runs(tmp_path)) == 5
