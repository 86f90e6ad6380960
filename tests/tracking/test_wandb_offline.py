"""W6: jobs of a multirun in one process, with W&B itself: one run each, the crashed one failed, nothing mixed up."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny import TinyModule
from tests.support.wandb_offline import PLACES, job, one, records

pytestmark = pytest.mark.slow


class Crashing(TinyModule):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3:
            raise RuntimeError("the job crashes")
        return super().training_step(batch, batch_idx)


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
    summary: dict[str, Any] = {}
    for record in second:
        summary |= record.get("summary", {}).get("update", {})
    assert summary["quality"] == 0.1824
    assert summary["memory/state_fraction"] == 0.25
    assert summary["budget/met"] is True
