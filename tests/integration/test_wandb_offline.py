"""W6: jobs of a multirun in one process, with W&B itself: one run each, the crashed one failed, nothing mixed up."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baoc.tracking.files import append_jsonl
from baoc.tracking.loggers import finishing, log_plan, log_reallocations, log_summary, make_loggers
from baoc.types import BlockMove, Reallocation
from tests.tiny import LIGHTNING_NOISE, TinyBatches, TinyLoader, TinyModule, tiny_trainer
from tests.values import make_plan, make_result

pytestmark = LIGHTNING_NOISE

STAYED = Reallocation(
    step=60,
    trigger="interval",
    accepted=False,
    why="risk 1 -> .99",
    moves=(),
    state_bytes_before=8,
    state_bytes_after=8,
    risk_before=1.0,
    risk_after=1.0,
)
MOVE = BlockMove(
    block="a",
    source="adamw",
    target="sign",
    kept={"m": "dropped"},
    bytes_before=80,
    bytes_after=8,
    why="saves 72 B",
)
MOVED = replace(
    STAYED,
    step=40,
    accepted=True,
    why="risk 2 -> 1",
    risk_before=2.0,
    moves=(MOVE,),
    state_bytes_before=80,
    update_rms_ratio={"a": 4.76},
)
PLACES = ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_ARTIFACT_DIR")


class Crashing(TinyModule):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3:
            raise RuntimeError("the job crashes")
        return super().training_step(batch, batch_idx)


def job(folder: Path, name: str, module: TinyModule) -> None:
    wandb = SimpleNamespace(project="p", entity=None, mode="offline")
    settings: Any = SimpleNamespace(names=("wandb",), wandb=wandb)
    config = {"name": name, "optim": {"betas": [0.9, 0.99]}}
    loggers = make_loggers(settings, run_dir=folder / name, name=name, config=config, group="study", tags=["a"])
    with finishing(loggers):
        log_plan(loggers, plan=make_plan())
        log_reallocations(loggers, run_dir=folder / name)  # nothing was decided yet
        for event in (MOVED, STAYED):
            append_jsonl(folder / name / "reallocations.jsonl", event)
        log_reallocations(loggers, run_dir=folder / name)
        tiny_trainer(logger=loggers, max_steps=4).fit(module, TinyLoader(), TinyBatches())
        log_summary(loggers, result=make_result())


def records(folder: Path) -> list[dict[str, Any]]:
    """The records of the one offline run below `folder`, read by W&B's own reader."""
    (run_dir,) = (folder / "wandb").glob("offline-run-*")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def one(kind: str, of: list[dict[str, Any]]) -> dict[str, Any]:
    return [record for record in of if record["type"] == kind][-1][kind]


def history(of: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record["history"]["item"] for record in of if record["type"] == "history"]


def logged_steps(of: list[dict[str, Any]]) -> list[int]:
    return [item["trainer/global_step"] for item in history(of) if "train/loss" in item]


def test_two_jobs_in_one_process_the_first_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in PLACES:
        monkeypatch.setenv(place, str(tmp_path / "wandb-home"))
    with pytest.raises(RuntimeError, match="the job crashes"):
        job(tmp_path, "first", Crashing())
    job(tmp_path, "second", TinyModule())

    first, second = records(tmp_path / "first"), records(tmp_path / "second")
    assert one("exit", first)["exit_code"] == 1
    assert one("exit", second).get("exit_code", 0) == 0
    for name, of in (("first", first), ("second", second)):
        run = next(record["run"] for record in of if record["type"] == "run")
        assert run["display_name"] == name
        assert run["config"]["update"]["name"] == name
        assert run["config"]["update"]["optim"] == {"betas": [0.9, 0.99]}
    assert one("run", first)["run_id"] != one("run", second)["run_id"]

    assert logged_steps(first) == [0, 1, 2]
    assert logged_steps(second) == [0, 1, 2, 3]
    assert any("allocation._type" in item for item in history(second)), "the allocation is a table"
    (table,) = (tmp_path / "second").rglob("media/table/reallocations*.json")
    content = json.loads(table.read_text())
    rows = [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]
    assert [(row["step"], row["block"], row["from"], row["to"], row["update_rms_ratio"]) for row in rows] == [
        (40, "a", "adamw", "sign", 4.76),
        (60, None, None, None, None),
    ]
    assert (rows[0]["states"], rows[0]["bytes_before"], rows[0]["bytes_after"]) == ("m dropped", 80, 8)
    assert (rows[0]["risk_before"], rows[0]["risk_after"], rows[0]["why"]) == (2.0, 1.0, "risk 2 -> 1; saves 72 B")
    summary: dict[str, Any] = {}
    for record in second:
        summary |= record.get("summary", {}).get("update", {})
    assert summary["quality"] == 0.1824
    assert summary["memory/state_fraction"] == 0.25
    assert summary["budget/met"] is True
