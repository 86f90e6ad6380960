"""Do the matching tests fail when a line is wrong? Every mutant of a module that mutmut makes, and whether a test told.

    PYTHONPATH=FOLDER python experiments/benchmarks/mutants.py codecs allocators
    # hours of 2 CPU cores -> mutants_all.csv

FOLDER holds mutmut (`pip install --target FOLDER mutmut==3.8.1`).

The tree is copied first, with what is not committed. A process collects the tests and forks once for each mutant: the
tests that call the changed function, those that told its mutants before first, until one fails; a test that fails in
such a fork without a mutant is left out. `timeout`: a test took
over three times its processor time and 2 s; other processes of the machine tell nothing. mutants_all.csv in
--out or experiments/results gets a row per mutant (module, mutant, status, and the line before and after where no test
told it), in place of the module's rows before; rows of functions that are gone or renamed are dropped and told. What
--seconds cut short is `not checked`. The exit code is 0.
"""

import argparse
import ast
import csv
import fnmatch
import gc
import importlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CAMPAIGNS = {  # files whose lines are changed, and the tests that are to tell, without their slow ones
    "statistics": ("core/statistics.py", "core/test_statistics.py"),
    "cost": (
        "planning/cost.py",
        "planning/test_cost.py planning/test_weights_planned.py "
        "optim/test_release.py::test_blocks_are_put_together_up_to_a_limit_beside_what_was_there "
        "optim/test_release.py::test_gradients_that_come_by_parts_wait_beside_the_peak_up_to_there",
    ),
    "inherit": ("optim/inherit.py", "optim/test_optim_migration.py"),
    "migrate": (
        "optim/migrate.py",
        "optim/test_optim_migration.py optim/test_optim_moves.py optim/test_optim_weights.py::TestMigration "
        "optim/test_optim_displacement.py",
    ),
    "codecs": ("optim/codecs.py", "optim/test_codecs.py optim/test_codec_errors.py optim/test_packed_codecs.py"),
    "footprint": ("profiling/footprint.py", "profiling/test_footprint.py profiling/test_footprint_on_cuda.py"),
    "allocators": (
        "planning/allocators/*.py",
        "planning/test_allocator.py planning/test_allocation.py planning/test_allocation_moves.py "
        "planning/test_program.py planning/test_allocation_properties.py planning/test_host_limits.py",
    ),
}
FIELDS = ("module", "mutant", "status", "line", "changed", "commit")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaigns", nargs="+", choices=CAMPAIGNS)
    parser.add_argument("--out", type=Path, default=ROOT / "experiments/results")
    parser.add_argument("--only", default="*", help="mutants of these names, such as *.lagrangian.x__round_*")
    parser.add_argument("--children", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="the most for a campaign's mutants")
    parser.add_argument("--tried-in", type=Path, help=argparse.SUPPRESS)  # the copied tree: set by this file itself
    args = parser.parse_args()
    if args.tried_in:
        (name,) = args.campaigns
        return try_all(name, only=args.only, children=args.children, seconds=args.seconds)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.campaigns:
        with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
            rows = campaign(name, only=args.only, folder=Path(folder), children=args.children, seconds=args.seconds)
        record(rows, args.out / "mutants_all.csv", only=args.only)
        for module in sorted({row["module"] for row in rows}):
            told = Counter(row["status"] for row in rows if row["module"] == module)
            print(f"{module}: {told.total()} mutants, {dict(told)}", flush=True)
    return 0


def campaign(name: str, *, only: str, folder: Path, children: int, seconds: float) -> list[dict[str, str]]:
    sys.path.insert(0, str(ROOT))  # not where mutants are tried: there baoc is the one that they are in
    from baoc.config.environment import commit

    (modules, _), now = CAMPAIGNS[name], commit() or ""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for file in filter(lambda file: (ROOT / file).is_file(), listed.splitlines()):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, folder / file)
    with (folder / "pyproject.toml").open("a") as config:
        config.write(
            "\n[tool.mutmut]\n"
            'source_paths = ["baoc/"]\n'
            f'only_mutate = ["baoc/{modules}"]\n'
            'also_copy = ["conf", "tests", "run.py", "README.md", "docs", "examples", "experiments"]\n'
        )
    env = os.environ | {"OMP_NUM_THREADS": "1", "BAOC_CACHE": str(folder / ".cache"), "BAOC_EXAMPLES": "quick"}
    env["PYTHONPATH"] = ":".join(part for part in env.get("PYTHONPATH", "").split(":") if part != str(ROOT))
    command = [sys.executable, "experiments/benchmarks/mutants.py", name, "--tried-in", str(folder)]
    command += ["--only", only, "--children", str(children), "--seconds", str(seconds)]
    with (folder / "log.txt").open("w+") as log:
        done = subprocess.run(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)
        log.seek(0)
        if done.returncode or not (folder / "tried.csv").exists():
            sys.exit(f"{log.read()[-4000:]}\n{' '.join(command)} ended with exit code {done.returncode}")
    with (folder / "tried.csv").open(newline="") as file:
        return [row | {"commit": now} for row in csv.DictReader(file)]


def try_all(name: str, *, only: str, children: int, seconds: float) -> int:
    """Writes the mutants of a campaign into a folder of the working directory, tries them, and leaves tried.csv."""
    from mutmut.__main__ import copy_also_copy_files, copy_src_dir, create_mutants, setup_source_paths  # pyright: ignore[reportMissingImports]
    from mutmut.mutation.data import SourceFileMutationData  # pyright: ignore[reportMissingImports]
    from mutmut.mutation.diff_apply import get_diff_for_mutant  # pyright: ignore[reportMissingImports]
    from mutmut.utils.file_utils import walk_mutatable_files  # pyright: ignore[reportMissingImports]

    os.environ["MUTANT_UNDER_TEST"] = "mutant_generation"
    Path("mutants").mkdir()
    copy_src_dir()
    copy_also_copy_files()
    setup_source_paths()
    create_mutants(children)
    paths: dict[str, Path] = {}
    for path in walk_mutatable_files():
        data = SourceFileMutationData(path=path)
        data.load()
        paths |= dict.fromkeys(fnmatch.filter(data.exit_code_by_key, only), path)
    shutil.copy("pyproject.toml", "mutants")
    os.environ["MUTANT_UNDER_TEST"] = ""
    os.chdir("mutants")
    trial = Trial(paths, children=children, until=time.monotonic() + seconds)
    tests = [f"tests/{test}" for test in CAMPAIGNS[name][1].split()]
    pytest.main(["-q", "--rootdir=.", "-p", "no:cacheprovider", "-m", "not slow", *tests], plugins=[trial])
    os.chdir("..")
    if not trial.status:
        return 1
    with Path("tried.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, restval="")
        writer.writeheader()
        for mutant, path in paths.items():
            status = trial.status.get(mutant, "not checked")
            row = {"module": str(path), "mutant": mutant, "status": status}
            if status in ("survived", "no tests", "timeout"):
                diff = get_diff_for_mutant(mutant, path=path).splitlines()[2:]
                row |= {
                    key: " ".join(line[1:].strip() for line in diff if line[:1] == by)
                    for key, by in (("line", "-"), ("changed", "+"))
                }
            writer.writerow(row)
    return 0


class Trial:
    """A plugin of pytest that runs the collected tests once in a fork, then those that matter in a fork per mutant."""

    def __init__(self, mutants: Iterable[str], *, children: int, until: float):
        self.status: dict[str, str] = {}
        self._mutants, self._children, self._until = list(mutants), children, until
        self._tells: dict[str, list[int]] = defaultdict(list)  # function: tests that told its mutants, the last first
        self._running: dict[int, tuple[str, int]] = {}
        self._failed: list[pytest.TestReport] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self) -> None:
        """The tests' own profiles follow this one: an example that fails is not made smaller."""
        from hypothesis import Phase, settings

        settings.register_profile("told", phases=[Phase.explicit, Phase.generate])
        settings.load_profile("told")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = session.items
        measured = None if session.testsfailed else self._measured(items)
        if measured is None:
            return True
        seconds, calls = measured
        told = os.open("../told.csv", os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # rows as they come
        sound: dict[str, list[int]] = {}
        for mutant in sorted(self._mutants, key=lambda m: sum(seconds[i] for i in calls[m.partition("__mutmut_")[0]])):
            function = mutant.partition("__mutmut_")[0]
            order = sorted(calls[function], key=seconds.__getitem__)
            while len(self._running) >= self._children:
                self._reap(told)
            if time.monotonic() > self._until:
                break
            if not order:
                self.status[mutant] = "no tests"
                continue
            if function not in sound:
                sound[function] = self._sound(items, order, seconds)
            order = list(dict.fromkeys([*self._tells[function], *sound[function]]))
            read, write = os.pipe()
            if (pid := os.fork()) == 0:
                os._exit(self._tell(items, order, mutant, seconds, write))
            os.close(write)
            self._running[pid] = (mutant, read)
        while self._running:
            self._reap(told)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.append(report)

    def _run(self, item: pytest.Item, following: pytest.Item | None) -> list[pytest.TestReport]:
        """The reports of what failed of the test."""
        self._failed.clear()
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        return self._failed

    def _measured(self, items: list[pytest.Item]) -> tuple[dict[int, float], dict[str, list[int]]] | None:
        """(Processor seconds of each test, the tests that call each function); None where one fails by itself."""
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            os._exit(self._measure(items, write))
        os.close(write)
        with os.fdopen(read) as lines:
            found = [line.split() for line in lines]
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            return None
        for module in found.pop():  # what tests import is imported once
            with suppress(ImportError):
                importlib.import_module(module)
        gc.freeze()
        calls: dict[str, list[int]] = defaultdict(list)
        for index, _, *functions in found:
            for function in functions:
                calls[function].append(int(index))
        return {int(index): float(cost) for index, cost, *_ in found}, calls

    def _measure(self, items: list[pytest.Item], write: int) -> int:
        from mutmut.state import state  # pyright: ignore[reportMissingImports]

        os.environ["MUTANT_UNDER_TEST"], here = "stats", set(sys.modules)
        for index, item in enumerate(items):
            before = time.process_time()
            if told := self._run(item, None if index + 1 == len(items) else items[index + 1]):
                print(f"{item.nodeid} fails without a mutant\n{told[0].longreprtext}", flush=True)
                return 1
            cost = time.process_time() - before
            os.write(write, f"{index} {cost} {' '.join(state()._stats)}\n".encode())
            state()._stats.clear()
        os.write(write, " ".join(["baoc", *(name for name in sys.modules if name not in here)]).encode())
        return 0

    def _sound(self, items: list[pytest.Item], order: list[int], seconds: Mapping[int, float]) -> list[int]:
        """The tests that pass in this order without a mutant: one that fails would tell none."""
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            os._exit(self._tell(items, order, "", seconds, write))
        os.close(write)
        with os.fdopen(read) as lines:
            failed = {int(line) for line in lines}
        os.waitpid(pid, 0)
        return [index for index in order if index not in failed]

    def _tell(
        self, items: list[pytest.Item], order: list[int], mutant: str, seconds: Mapping[int, float], write: int
    ) -> int:
        os.environ["MUTANT_UNDER_TEST"] = mutant
        for index, following in zip(order, [*order[1:], None], strict=True):
            limit = time.process_time() + 3 * seconds[index] + 2
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit), resource.RLIM_INFINITY))
            signal.alarm(900)  # what waits for nothing takes no processor time
            told: object = True  # by what ends pytest itself
            with suppress(BaseException):
                told = self._run(items[index], None if following is None else items[following])
            if told:
                os.write(write, f"{index}\n".encode())
                if mutant:
                    return 1
        return 0

    def _reap(self, told: int) -> None:
        pid, ended = os.wait()
        mutant, read = self._running.pop(pid)
        with os.fdopen(read) as pipe:
            teller = pipe.read()
        code = os.waitstatus_to_exitcode(ended)
        # A mutant that crashes its process is told too.
        self.status[mutant] = (
            "timeout" if code in (-signal.SIGXCPU, -signal.SIGALRM) else "killed" if code else "survived"
        )
        os.write(told, f"{mutant},{self.status[mutant]}\n".encode())
        if teller:
            tells = self._tells[mutant.partition("__mutmut_")[0]]
            tells[:] = [int(teller), *(index for index in tells if index != int(teller))][:4]


@cache
def functions_in(path: Path) -> set[str]:
    """The functions of a module, and CLASS.METHOD."""
    tree = ast.parse(path.read_text() if path.exists() else "")
    holders = [("", tree), *((f"{node.name}.", node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    return {f"{at}{node.name}" for at, holder in holders for node in holder.body if isinstance(node, ast.FunctionDef)}


def function_of(mutant: str) -> str:
    """`f` of `baoc.a.x_f__mutmut_1`, `C.f` of `baoc.a.x\u01c1C\u01c1f__mutmut_1`."""
    name = mutant.partition("__mutmut_")[0].rpartition(".")[2]
    return name[2:].replace("\u01c1", ".")


def record(rows: list[dict[str, str]], path: Path, *, only: str) -> None:
    """Writes the rows in place of the earlier ones of their modules, of the names that were asked for. Those of
    functions that are gone, also by another name, are dropped, which is said."""
    modules, kept = {row["module"] for row in rows}, list[dict[str, str]]()
    gone: Counter[str] = Counter()
    with path.open(newline="") if path.exists() else nullcontext(()) as file:
        for row in csv.DictReader(file):
            if function_of(row["mutant"]) not in functions_in(ROOT / row["module"]):
                gone[f"{row['module']}: {function_of(row['mutant'])}"] += 1
            elif row["module"] not in modules or not fnmatch.fnmatch(row["mutant"], only):
                kept.append(row)
    for function, count in gone.items():
        print(
            f"{function} is gone or has another name, and its {count} rows go: try its campaign as a whole", flush=True
        )
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted([*kept, *rows], key=lambda row: (row["module"], row["mutant"])))


if __name__ == "__main__":
    sys.exit(main())
