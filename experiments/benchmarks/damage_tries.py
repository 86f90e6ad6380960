"""Damage to the files of a run folder, again and again: whoever reads it says so in a sentence, or is not disturbed.

`python experiments/benchmarks/damage_tries.py --tries 200` takes about half a second a try after one short run of the
digits. Each try copies the run's folder and tears, flips, empties or replaces one of its files. Then `resume=auto`
looks for a checkpoint, the metrics are read, and a frontier is made. An error that is not one of ours (a BaocError) is
a fault, and so is a checkpoint that was taken although its own file was damaged. damage_tries.csv in $OUT or
experiments/results gets a line per try; the exit code is the number of faults.
"""

import argparse
import csv
import io
import os
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, fields
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc.config.from_hydra import write_config  # noqa: E402
from baoc.config.schema import CheckpointConfig, ModelConfig, RunConfig, TrainerConfig  # noqa: E402
from baoc.core.budgets import parse_budget  # noqa: E402
from baoc.errors import BaocError  # noqa: E402
from baoc.frontier.build import frontier_of  # noqa: E402
from baoc.tracking import read_metrics  # noqa: E402
from baoc.training import run as training  # noqa: E402
from baoc.training.resume import find_checkpoint, kept  # noqa: E402

REPLACEMENTS = (b"", b"{}", b"[]", b"null", b"3", b'"text"', b"\xff\xfe\x00", b"a,b\n1\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    number: int
    seed: int
    file: str
    damage: str
    outcomes: str  # of each reader: done, or the kind of its error
    fault: str


def config(*, resume: str | None = None) -> RunConfig:
    return RunConfig(
        name="damage",
        device="cpu",
        batch_size=32,
        resume=resume,
        budget=parse_budget("state_25"),
        model=ModelConfig(options={"dropout": 0.1}),
        trainer=TrainerConfig(max_steps=4, enable_progress_bar=False, num_sanity_val_steps=0, log_every_n_steps=1),
        checkpoint=CheckpointConfig(every_n_steps=1, keep=3, export=False),
    )


def damage(path: Path, *, draw: random.Random) -> str:
    """Damages a file and says how."""
    content = path.read_bytes()
    kind = draw.choice(("torn", "flipped", "replaced"))
    if kind == "torn":
        keep = draw.randrange(len(content) or 1)
        path.write_bytes(content[:keep])
        return f"torn after {keep} of {len(content)} bytes"
    if kind == "flipped" and content:
        place = draw.randrange(len(content))
        changed = bytearray(content)
        changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        return f"a bit of byte {place} of {len(content)} flipped"
    new = draw.choice(REPLACEMENTS)
    path.write_bytes(new)
    return f"replaced by {new!r}"


def readers(run_dir: Path) -> dict[str, Callable[[], object]]:
    asked = config(resume="auto")
    return {
        "resume": lambda: find_checkpoint(asked, run_dir=run_dir),
        "decision": lambda: kept(asked, checkpoint=run_dir / "checkpoints" / "last.ckpt"),
        "metrics": lambda: read_metrics(run_dir),
        "frontier": lambda: frontier_of(run_dir.parent, show=False),
    }


def attempt(whole: Path, folder: Path, *, number: int, seed: int) -> Try:
    draw = random.Random(seed)
    run_dir = folder / "day" / "job"
    shutil.copytree(whole, run_dir)
    file = draw.choice(sorted(path for path in run_dir.rglob("*") if path.is_file()))
    how = damage(file, draw=draw)
    outcomes, fault = [], ""
    for name, read in readers(run_dir).items():
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                found = read()
            outcomes.append(f"{name} done")
            if name == "resume" and found == file:
                fault = "a damaged checkpoint was taken"
        except BaocError as error:
            outcomes.append(f"{name} {type(error).__name__}")
        except Exception as error:
            outcomes.append(f"{name} {type(error).__name__}")
            fault = f"{name}: {type(error).__name__}: {error} at {traceback.extract_tb(error.__traceback__)[-1].name}"
    name = str(file.relative_to(run_dir))
    shutil.rmtree(folder / "day")
    return Try(number=number, seed=seed, file=name, damage=how, outcomes="; ".join(outcomes), fault=fault)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    default = os.environ.get("OUT") or ROOT / "experiments" / "results"
    parser.add_argument("--out", type=Path, default=Path(default))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    faults = 0
    with tempfile.TemporaryDirectory() as temporary, (given.out / "damage_tries.csv").open("w", newline="") as table:
        writer = csv.DictWriter(table, [field.name for field in fields(Try)], lineterminator="\n")
        writer.writeheader()
        whole = Path(temporary) / "whole"
        whole.mkdir()
        with redirect_stdout(io.StringIO()):
            write_config(config(), path=whole / "config.yaml")
            training.run(config(), run_dir=whole, command="damage_tries")
        for number in range(given.tries):
            made = attempt(whole, Path(temporary), number=number, seed=given.seed + number)
            writer.writerow(asdict(made))
            table.flush()
            if made.fault:
                faults += 1
                print(f"try {number}: {made.file} {made.damage}: {made.fault}", flush=True)
    print(f"{given.tries} tries, {faults} with faults; {given.out / 'damage_tries.csv'}")
    return min(faults, 100)


if __name__ == "__main__":
    sys.exit(main())
