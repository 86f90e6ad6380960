"""Races whose runs are a few lines of Python and whose entrants are given. The runner and the study are real."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from baoc.config.compose import compose
from baoc.config.from_hydra import from_hydra
from baoc.config.schema import RunConfig
from baoc.core.recipes import RECIPES, Recipe, recipe_node
from baoc.racing.entrants import ENTRANTS_FILE

# A run in milliseconds: recipe, rate, seed and steps decide its score, and each attempt leaves a line.
STUB = """
import json, math, os, shlex, signal, sys, time
from pathlib import Path
words = dict(word.split("=", 1) for word in sys.argv[1:])
folder = Path(words["hydra.run.dir"])
recipe = Path(words.get("recipe", "plan"))
name = recipe.stem
lr, seed, steps = float(words["optim.lr"]), int(words["seed"]), int(words["trainer.max_steps"])
with (folder / "attempts").open("a") as file:
    file.write(words.get("resume", "new") + "\\n")
(folder / "process").write_text(str(os.getpid()))
time.sleep(float(words.get("task.sleep", 0)))
def fail(code, message, kind="K"):
    (folder / "error.json").write_text(json.dumps({"schema": 1, "kind": kind, "message": message, "exit_code": code}))
    sys.exit(code)
if recipe.suffix and not recipe.is_file():
    fail(2, f"recipe={recipe}: there is no such file")
if name == "adamw8":
    fail(3, "least feasible is 9 MiB")
if name == "lion8":
    fail(5, "nan", kind="DivergedError")
gap = {"adamw4": 0.2, "muon8_lean": 0.0, "foam8_lean": 0.001, "plan": -0.1, "permuted": 0.3}[name]
own = 0.0005 * math.sin(17 * seed + sum(map(ord, name)))
value = 1 + gap + 0.1 * abs(lr / 3e-3 - 1) + 0.05 * math.cos(seed) + own + 10 / steps
result = {"quality": {"value": value}, "state_bytes": 1, "peak_bytes": 1, "samples_per_s": 1.0, "num_params": 1000}
result |= {"step_ms": 10.0, "command": shlex.join(sys.argv)}
(folder / "last.ckpt").write_text("")
(folder / "result.json").write_text(json.dumps(result))
"""
WORDS = ["model=vit", "budget=state_25", "mode=race"]
NAMES = ("adamw4", "muon8_lean", "foam8_lean", "adamw8", "lion8", "plan", "permuted")
BYTES = dict(zip(NAMES, (250, 240, 140, 260, 230, 390, 390), strict=True))


def config(folder: Path, *words: str) -> RunConfig:
    made = composed(*words)
    if any(word.startswith("race.library=") for word in words):
        return made
    return replace(made, race=replace(made.race, library=str(folder / "library")))


@cache
def composed(*words: str) -> RunConfig:
    """A test composes the same words some times over, for a tenth of a second each."""
    return from_hydra(compose([*WORDS, *words]))


def write_target(folder: Path, *, names: tuple[str, ...] = NAMES, **changes: Any) -> None:
    """The entrants that a plan on the device would have left."""
    racers = [
        {
            "name": name,
            "state_bytes": BYTES[name],
            "uniform": name in RECIPES,
            "control": name == "permuted",
            "recipe": recipe_node(_recipe(name)),
        }
        for name in names
    ]
    about = {
        "size": "tiny", "num_params": 1000, "state_bytes_adamw": 1600, "data": "digits", "num_train": 1438,
        "batch_size": 64, "steps": 400, "lr": 3e-3, "quality": "val/loss", "higher_is_better": False,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ENTRANTS_FILE).write_text(json.dumps({"schema": 1, "racers": racers, **about, **changes}))


def _recipe(name: str) -> Recipe:
    return RECIPES[name] if name in RECIPES else replace(Recipe(name=name), blocks={"layers.0.mlp": "muon_int8"})


def attempts(folder: Path) -> dict[str, list[str]]:
    return {file.parent.name: file.read_text().split() for file in sorted(folder.glob("*/attempts"))}
