"""Whether the least feasible budget that a run states is one: it works there, and one byte less is refused.

    python experiments/benchmarks/least_check.py OUT.csv  # 1 minute of any device -> OUT.csv

Three runs of
`run.py` in processes of their own, as a user would start them, and a fourth with budget=auto.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from experiments.benchmarks.shared import write_rows

QUIET = "trainer.max_steps=8 trainer.enable_progress_bar=false trainer.limit_val_batches=1 checkpoint.export=false"


def started(budget: str, *, overrides: list[str], folder: Path, keep: Path | None) -> dict[str, object]:
    began = time.time()
    command = [sys.executable, "run.py", *overrides, f"budget={budget}", *QUIET.split(), f"hydra.run.dir={folder}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = next((line for line in done.stderr.splitlines() if "baoc: error" in line), "")
    row: dict[str, object] = {"budget": budget, "exit_code": done.returncode, "said": said}
    for name in ("footprint.json", "allocation.json", "options.csv"):
        if keep is not None and (folder / name).is_file():
            keep.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / name, keep / f"{budget}_{name}")
    result = folder / "result.json"
    if result.is_file():
        found = json.loads(result.read_text())
        row |= {key: found[key] for key in ("peak_bytes", "peak_bytes_predicted", "budget_bytes", "budget_met")}
    deciding = folder / "deciding.json"
    if deciding.is_file():
        row["deciding"] = {name: round(s, 1) for name, s in json.loads(deciding.read_text())["phases_s"].items()}
    row["seconds"] = round(time.time() - began, 1)
    print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--too-little", default="800mb")
    parser.add_argument("--override", nargs="*", default=["model=vit", "model.size=small", "batch_size=32"])
    parser.add_argument("--keep", type=Path, help="folder for the runs' footprints and options")
    parser.add_argument("--no-auto", action="store_true")
    asked = parser.parse_args()
    rows: list[dict[str, object]] = []
    with TemporaryDirectory() as folder:
        run = lambda budget: started(budget, overrides=asked.override, folder=Path(folder) / budget, keep=asked.keep)  # noqa: E731
        rows.append(run(asked.too_little))
        least = re.search(r"(\d+) bytes", str(rows[0]["said"]).partition("the least ")[2])
        assert least, f"no least feasible budget in: {rows[0]['said']}"
        wanted = int(least.group(1))
        for budget in (wanted, wanted - 1):
            rows.append(run(f"{budget}b"))
        if not asked.no_auto:
            rows.append(run("auto"))
    write_rows(asked.out, rows)
    expected = [3, 0, 3] + ([] if asked.no_auto else [0])
    print("as promised" if [row["exit_code"] for row in rows] == expected else "NOT as promised")


if __name__ == "__main__":
    main()
