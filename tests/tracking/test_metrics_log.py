"""metrics.jsonl: schema, one value per step whatever happened, nothing lost by a kill, and its mirror as CSV."""

import csv
import json
import signal
from pathlib import Path

import pytest

from baoc.errors import BadInputError
from baoc.tracking.files import read_jsonl
from baoc.tracking.jsonl import JsonlLogger
from baoc.tracking.metrics import read_metrics, supersede
from tests.support.commands import start_script


def series(path: Path, key: str) -> list[tuple[int, float | None]]:
    """(step, value) of one metric."""
    return [(row["step"], row[key]) for row in read_metrics(path) if key in row]


def log_steps(run_dir: Path, steps: range, *, value: float = 0.0) -> JsonlLogger:
    logger = JsonlLogger(run_dir, name="x")
    for step in steps:
        logger.log_metrics({"train/loss": value + step, "epoch": step // 2}, step=step)
    return logger


def test_a_line_has_the_schema(tmp_path: Path) -> None:
    log_steps(tmp_path, range(1))
    (line,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert list(line) == ["schema", "step", "epoch", "time_s", "train/loss"]
    assert (line["schema"], line["step"], line["epoch"], line["train/loss"]) == (1, 0, 0, 0.0)


def test_lines_of_a_step_are_merged_and_the_later_value_wins(tmp_path: Path) -> None:
    logger = log_steps(tmp_path, range(2))
    logger.log_metrics({"val/loss": 5.0}, step=1)
    logger.log_metrics({"train/loss": 9.0}, step=0)
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1]
    assert series(tmp_path, "train/loss") == [(0, 9.0), (1, 1.0)]
    assert series(tmp_path, "val/loss") == [(1, 5.0)]


def test_without_a_step_the_next_one_is_taken(tmp_path: Path) -> None:
    logger = log_steps(tmp_path, range(2))
    logger.log_metrics({"train/loss": 7.0})
    assert series(tmp_path, "train/loss")[-1] == (2, 7.0)


def test_nan_is_null(tmp_path: Path) -> None:
    JsonlLogger(tmp_path).log_metrics({"train/loss": float("nan")}, step=0)
    assert series(tmp_path, "train/loss") == [(0, None)]


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"schema": 2, "step": 0, "epoch": 0, "time_s": 0.0}\n')
    with pytest.raises(BadInputError, match=r"has schema 2, and this version of baoc reads up to 1: upgrade"):
        read_metrics(tmp_path)


def test_a_resumed_run_supersedes_the_steps_of_the_lost_attempt(tmp_path: Path) -> None:
    log_steps(tmp_path, range(6)).finalize("failed")
    logger = JsonlLogger(tmp_path)
    assert logger.resume_from(step=4) == 2
    for step in range(4, 8):
        logger.log_metrics({"train/loss": 100.0 + step}, step=step)
    assert series(tmp_path, "train/loss") == [(s, float(s)) for s in range(4)] + [(s, 100.0 + s) for s in range(4, 8)]
    assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl.superseded")] == [4, 5]


def test_time_goes_on_after_a_resume(tmp_path: Path) -> None:
    line = {"schema": 1, "step": 0, "epoch": 0, "time_s": 1000.0, "train/loss": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    log_steps(tmp_path, range(1, 2))
    assert read_metrics(tmp_path)[1]["time_s"] >= 1000.0


def test_a_new_run_in_an_old_folder_supersedes_all(tmp_path: Path) -> None:
    log_steps(tmp_path, range(3)).finalize("success")
    assert JsonlLogger(tmp_path).resume_from(step=0) == 3
    assert read_metrics(tmp_path) == []


def test_superseding_sets_a_torn_end_aside(tmp_path: Path) -> None:
    log_steps(tmp_path, range(3)).finalize("failed")
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"schema": 1, "st')
    assert supersede(path, from_step=2) == 1
    assert [line["step"] for line in read_jsonl(path)] == [0, 1]
    assert (tmp_path / "metrics.jsonl.torn").exists()
    assert supersede(tmp_path / "none.jsonl", from_step=0) == 0


@pytest.mark.slow
def test_sigkill_leaves_every_step(tmp_path: Path) -> None:
    script = tmp_path / "logs.py"
    script.write_text(
        "import os, signal, sys\n"
        "from baoc.tracking.jsonl import JsonlLogger\n"
        "logger = JsonlLogger(sys.argv[1])\n"
        "for step in range(200):\n"
        "    logger.log_metrics({'train/loss': step / 7}, step=step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    code, told = start_script(script, str(tmp_path), folder=tmp_path).done()
    assert code == -signal.SIGKILL, told
    assert series(tmp_path, "train/loss") == [(step, step / 7) for step in range(200)]


def test_the_csv_mirrors_the_jsonl(tmp_path: Path) -> None:
    log_steps(tmp_path, range(3)).log_metrics({"val/loss": 0.5}, step=2)
    JsonlLogger(tmp_path, csv_every_s=3600).finalize("success")
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [row["train/loss"] for row in rows] == ["0.0", "1.0", "2.0"]
    assert [row["val/loss"] for row in rows] == ["", "", "0.5"]
    assert list(rows[0]) == ["step", "epoch", "time_s", "train/loss", "val/loss"]


def test_the_csv_is_not_written_at_every_step(tmp_path: Path) -> None:
    log_steps(tmp_path, range(1))
    JsonlLogger(tmp_path, csv_every_s=3600).save()
    assert not (tmp_path / "metrics.csv").exists()
    JsonlLogger(tmp_path, csv_every_s=0).save()
    assert (tmp_path / "metrics.csv").exists()


@pytest.mark.parametrize("line", ["{}", '{"schema": 1}', '{"schema": "1", "step": 0}', '{"schema": 1, "step": null}'])
def test_a_line_that_is_none_of_ours_is_told(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n")
    with pytest.raises(BadInputError, match=r"has a line without schema and step .*: it was damaged; remove that line"):
        read_metrics(tmp_path)
    JsonlLogger(tmp_path)  # whoever resumes is not disturbed by it


@pytest.mark.parametrize("step", [None, "1", 1.5, True])
def test_a_step_that_is_no_number_is_told_when_its_line_would_be_superseded(tmp_path: Path, step: object) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"schema": 1, "step": step}) + "\n")
    with pytest.raises(BadInputError, match=r"has a line whose step is no number .*: it was damaged; remove that line"):
        supersede(path, from_step=0)
    assert path.read_text() and not (tmp_path / "metrics.jsonl.superseded").exists()


@pytest.mark.parametrize("time_s", [None, "x", []])
def test_a_time_that_is_no_number_does_not_count(tmp_path: Path, time_s: object) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"schema": 1, "step": 0, "time_s": time_s}) + "\n")
    log_steps(tmp_path, range(1, 2))
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1]
