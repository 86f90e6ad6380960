"""W&B of a sweep, without a network: the frontier as a run of its own, trials in their study's group."""

from pathlib import Path

import pytest

from baoc.frontier.build import write_frontier
from baoc.frontier.wandb_frontier import log_frontier
from baoc.tracking.files import write_json
from tests.support.sweep_jobs import config, job
from tests.support.tiny import TinyModule
from tests.support.wandb_offline import job as wandb_job
from tests.support.wandb_offline import one, records

pytestmark = pytest.mark.slow


def logged(folder: Path, names: list[str]) -> None:
    wandb = {"project": "p", "entity": None, "mode": "offline"}
    for seed, loss in ((0, 0.1), (1, 0.2)):
        settings = config(seed=seed, budget="state_50", allocator="exact", logger={"names": names, "wandb": wandb})
        job(folder / f"000{seed}", loss=loss, seed=seed, state_bytes=50, settings=settings)


def test_a_frontier_is_a_run_in_the_group_of_its_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    logged(tmp_path, ["jsonl", "wandb"])
    write_json(tmp_path / "study.json", {"name": "my_study"})
    assert log_frontier(tmp_path, write_frontier(tmp_path, show=False))
    of = records(tmp_path)
    run = one("run", of)
    assert (run["run_group"], run["job_type"], run["display_name"]) == ("my_study", "frontier", "frontier of my_study")
    history = [record["history"]["item"] for record in of if record["type"] == "history"]
    keys = {key.split(".")[0] for item in history for key in item}
    name = "vision_vit"
    assert {f"frontier/{name}", "frontier/page"} <= keys, keys
    summaries = {key for record in of for key in record.get("summary", {}).get("update", {})}
    assert f"frontier/{name}_hypervolume_doublings" in summaries, "what it is measured in is in its name"


def test_a_frontier_that_wandb_loses_is_told_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refused(**_: object) -> None:
        raise ConnectionResetError("gone")

    monkeypatch.setattr("wandb.init", refused)
    logged(tmp_path, ["jsonl", "wandb"])
    assert not log_frontier(tmp_path, write_frontier(tmp_path, show=False))
    told = " ".join(capsys.readouterr().out.split())
    assert "left out (ConnectionResetError: gone); frontier.csv and frontier.html hold what it has" in told


def test_without_wandb_there_is_no_frontier_run(tmp_path: Path):
    logged(tmp_path, ["jsonl"])
    assert not log_frontier(tmp_path, write_frontier(tmp_path, show=False))
    assert not (tmp_path / "wandb").exists()


def test_a_trial_is_in_the_group_of_its_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_RUN_GROUP", "my_study")
    monkeypatch.setenv("WANDB_JOB_TYPE", "trial")
    wandb_job(tmp_path, "a", TinyModule())
    run = one("run", records(tmp_path / "a"))
    assert (run["run_group"], run["job_type"]) == ("my_study", "trial")
