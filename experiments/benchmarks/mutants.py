"""Do the matching tests fail when a line is wrong? Every mutant of a module, by mutmut, and whether a test told it.

    pip install --target FOLDER mutmut==3.8.1
    PYTHONPATH=FOLDER python experiments/benchmarks/mutants.py codecs|footprint|migrate|... [--out FOLDER]

The tree is copied first, with what is not committed. mutants_all.csv in --out or experiments/results gets a row per
mutant (module, mutant, status, and the line before and after where no test told it), in place of the module's rows
before. What --seconds cut short is `not checked`. The exit code is 0.
"""

import argparse
import csv
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc.config.environment import commit  # noqa: E402

CAMPAIGNS = {  # files whose lines are changed, and the tests that are to tell, without their slow ones
    "statistics": ("core/statistics.py", "core/test_statistics.py"),
    "cost": ("planning/cost.py", "planning/test_cost.py"),
    "inherit": ("optim/inherit.py", "optim/test_optim_migration.py"),
    "migrate": (
        "optim/migrate.py",
        "optim/test_optim_migration.py optim/test_optim_moves.py optim/test_optim_weights.py::TestMigration "
        "optim/test_optim_displacement.py",
    ),
    "codecs": ("optim/codecs.py", "optim/test_codecs.py optim/test_codec_errors.py optim/test_packed_codecs.py"),
    "footprint": ("profiling/footprint.py", "profiling/test_footprint.py"),
    "allocators": (
        "planning/allocators/*.py",
        "planning/test_allocator.py planning/test_allocation.py planning/test_allocation_moves.py "
        "planning/test_allocation_properties.py planning/test_host_limits.py",
    ),
}
FIELDS = ("module", "mutant", "status", "line", "changed", "commit")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaigns", nargs="+", choices=CAMPAIGNS)
    parser.add_argument("--out", type=Path, default=ROOT / "experiments/results")
    parser.add_argument("--children", type=int, default=2)
    parser.add_argument("--seconds", type=float, help="the most that the mutants of a campaign are tried for")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.campaigns:
        with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
            rows = campaign(name, folder=Path(folder), children=args.children, seconds=args.seconds)
        record(rows, args.out / "mutants_all.csv")
        for module in sorted({row["module"] for row in rows}):
            told = Counter(row["status"] for row in rows if row["module"] == module)
            print(f"{module}: {told.total()} mutants, {dict(told)}", flush=True)
    return 0


def campaign(name: str, *, folder: Path, children: int, seconds: float | None) -> list[dict[str, str]]:
    modules, tests = CAMPAIGNS[name]
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for file in filter(lambda file: (ROOT / file).is_file(), listed.splitlines()):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, folder / file)
    with (folder / "pyproject.toml").open("a") as config:
        config.write(
            "\n[tool.mutmut]\n"
            'source_paths = ["baoc/"]\n'
            f'only_mutate = ["baoc/{modules}"]\n'
            f"pytest_add_cli_args_test_selection = {[f'tests/{test}' for test in tests.split()]}\n"
            'pytest_add_cli_args = ["-q", "-p", "no:cacheprovider", "-x", "-m", "not slow"]\n'
            "timeout_multiplier = 4.0\n"
            'also_copy = ["conf", "tests", "run.py", "README.md", "docs", "examples", "experiments"]\n'
        )
    env = os.environ | {"OMP_NUM_THREADS": "1", "BAOC_CACHE": str(folder / ".cache"), "BAOC_EXAMPLES": "quick"}
    env["PYTHONPATH"] = ":".join(part for part in env.get("PYTHONPATH", "").split(":") if part != str(ROOT))

    def mutmut(*words: str, timeout: float | None = None) -> str:
        command = [sys.executable, "-m", "mutmut", *words]
        done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, timeout=timeout)
        if done.returncode:
            sys.exit(f"{done.stdout[-4000:]}\nmutmut {' '.join(words)} ended with exit code {done.returncode}")
        return done.stdout

    with suppress(subprocess.TimeoutExpired):
        mutmut("run", "--max-children", str(children), timeout=seconds)
    rows: list[dict[str, str]] = []
    for told in mutmut("results", "--all", "true").splitlines():
        mutant, _, status = told.strip().partition(": ")
        row = dict.fromkeys(FIELDS, "") | {"mutant": mutant, "status": status, "commit": commit() or ""}
        row["module"] = mutant.rpartition(".")[0].replace(".", "/") + ".py"
        if status not in ("killed", "timeout", "not checked"):
            diff = [line for line in mutmut("show", mutant).splitlines() if line[:3] not in ("---", "+++")]
            row["line"], row["changed"] = (" ".join(line[1:].strip() for line in diff if line[:1] == by) for by in "-+")
        rows.append(row)
    return rows


def record(rows: list[dict[str, str]], path: Path) -> None:
    """Writes the rows in place of the earlier ones of their modules."""
    modules = {row["module"] for row in rows}
    kept: list[dict[str, str]] = []
    if path.exists():
        with path.open(newline="") as file:
            kept = [row for row in csv.DictReader(file) if row["module"] not in modules]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted([*kept, *rows], key=lambda row: (row["module"], row["mutant"])))


if __name__ == "__main__":
    sys.exit(main())
