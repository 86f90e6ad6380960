"""Run folders of finished and failed jobs, as a sweep leaves them."""

import json
from pathlib import Path
from typing import Any

import yaml

from baoc.tracking.files import write_json
from baoc.types import Quality
from tests.support.values import make_result


def config(*, seed: int, budget: str, allocator: str, **changes: Any) -> dict[str, Any]:
    values = {
        "name": f"vit_{budget}",
        "seed": seed,
        "budget": {"name": budget, "memory_bytes": None, "state_fraction": int(budget.split("_")[1]) / 100},
        "allocator": {"name": allocator},
        "dataset": {"name": "digits", "path": None},
        "optim": {"lr": 0.003, "betas": [0.9, 0.999]},
    }
    return values | changes


def job(
    folder: Path,
    *,
    loss: float,
    budget: str = "state_50",
    allocator: str = "exact",
    seed: int = 0,
    state_bytes: int = 100,
    peak_bytes: int = 1000,
    settings: dict[str, Any] | None = None,
    **changes: Any,
) -> None:
    folder.mkdir(parents=True)
    quality = Quality(name="val/loss", value=loss, higher_is_better=False)
    result = make_result(
        budget={"kind": "state_fraction", "name": budget, "limit": 1},
        allocator=allocator,
        seed=seed,
        state_bytes=state_bytes,
        peak_bytes=peak_bytes,
        **({"quality": quality} | changes),
    )
    write_json(folder / "result.json", result)
    if settings is None:
        settings = config(seed=seed, budget=budget, allocator=allocator)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))


def error(folder: Path, *, exit_code: int, message: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"schema": 1, "kind": "X", "message": message, "exit_code": exit_code})
    (folder / "error.json").write_text(text)


def three_families(folder: Path) -> None:
    for seed, loss in ((0, 0.10), (1, 0.20)):
        job(folder / f"exact_{seed}", loss=loss, seed=seed, state_bytes=50, peak_bytes=500)
    job(folder / "random", loss=0.30, allocator="random", state_bytes=50, peak_bytes=500)
    job(folder / "uniform", loss=0.20, allocator="uniform_sign", state_bytes=20, peak_bytes=400)
    job(folder / "worst", loss=0.50, allocator="uniform_adamw", state_bytes=100, peak_bytes=1000)
