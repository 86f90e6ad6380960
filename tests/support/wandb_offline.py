"""A training job that logs to W&B offline, and the records it left on disk."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from baoc.tracking.loggers import finishing, log_plan, log_summary, make_loggers
from tests.support.tiny import TinyBatches, TinyLoader, TinyModule, tiny_trainer
from tests.support.values import make_plan, make_result

PLACES = ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_ARTIFACT_DIR")


def job(folder: Path, name: str, module: TinyModule) -> None:
    about = {"name": name, "config": {"name": name, "optim": {"betas": [0.9, 0.99]}}, "group": "study", "tags": ["a"]}
    wandb = {"project": "p", "entity": None, "mode": "offline"}
    loggers = make_loggers(["wandb"], wandb=wandb, run_dir=folder / name, **about)
    with finishing(loggers):
        log_plan(loggers, plan=make_plan())
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
