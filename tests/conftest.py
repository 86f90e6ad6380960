"""What all tests share: hypothesis without clocks, and a fresh interpreter for what must hold at import."""

import atexit
import gc
import logging
import multiprocessing
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.abc import MetaPathFinder
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from baoc.cli.fast_import import import_torchmetrics
from tests.support.examples import load_profile
from tests.support.interpreting import INTERPRETING
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE_S

load_profile()

# The native optimizer step is compiled into the checkout's own cache, not into the user's.
os.environ.setdefault("BAOC_CACHE", str(ROOT / ".pytest_cache" / "baoc"))

# Under PYTHONDONTWRITEBYTECODE, as images set it, each worker of each run would rewrite the assertions of all modules.
# Only what is collected is kept: tests import modules that they have just written.
GIVEN = sys.dont_write_bytecode
sys.dont_write_bytecode = False

# What tests import stays until they end: looking for garbage in it, again and again, is a twentieth of their seconds.
gc.disable()

# Workers side by side share the cores; each with threads for all of them would make every one slower.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """For `-n auto`, as many as there are cores, and one more for slow tests, of which some wait (launchers that poll,
    processes that end)."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    return len(os.sched_getaffinity(0)) + (config.getoption("markexpr") != "not slow")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """For `-m "not slow"`, each worker would else import files of which it runs nothing, and their libraries."""
    if config.getoption("markexpr") != "not slow" or collection_path.suffix != ".py":
        return None
    all_slow = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.slow\b", re.MULTILINE)
    return bool(all_slow.search(collection_path.read_text(encoding="utf-8"))) or None


# Seconds of a processor, or of waiting, that the longest files take; of others a slow test takes a third of one.
LONG_S = {
    "training/test_decision.py": 40, "optim/test_sharded.py": 30, "training/test_least_kept.py": 35,
    "training/test_ddp_runs.py": 30, "sweep/test_race.py": 25, "sweep/test_study_robust.py": 15,
    "cli/test_several_devices.py": 20, "cli/test_exit_codes.py": 15, "training/test_preemption.py": 10,
    "sweep/test_study_launchers.py": 10, "cli/test_jobs.py": 15, "sweep/test_sweeps.py": 15,
    "training/test_experiments.py": 10, "training/test_budget_control.py": 10, "kernels/test_muon_step.py": 15,
    "kernels/test_kernels_matrix.py": 15, "training/test_run.py": 10, "training/test_checkpoint_kinds.py": 15,
    "kernels/test_fused_backend.py": 15, "examples/test_examples.py": 10, "training/test_plan_bytes.py": 10,
    "training/test_front_doors.py": 10, "config/test_own_code.py": 10, "cli/test_mixed_multirun.py": 10,
    "training/test_planning.py": 10, "profiling/test_depth.py": 10, "frontier/test_frontier_picture.py": 10,
    "kernels/test_storage_paths.py": 5, "training/test_measured_choice.py": 25,
}  # fmt: skip


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each worker begins with its share of the slow files, whole and the longest first, so that what a module sets up
    is set up once and all end together: `--dist=worksteal` deals the list out in equal runs, and moves what is left at
    their ends, which is short. Shares of equal seconds that are longer than the runs give way to ones of equal length.
    """
    if not hasattr(config, "workerinput"):
        return
    workers = config.workerinput["workercount"]
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow"):
            files.setdefault(item.nodeid.partition("::")[0].removeprefix("tests/"), []).append(item)
    sizes = [len(items) * (number + 1) // workers - len(items) * number // workers for number in range(workers)]
    shares = dealt(files, {name: LONG_S.get(name, len(file) / 3) for name, file in files.items()}, workers=workers)
    if any(len(share) > size for share, size in zip(shares, sizes, strict=True)):
        shares = dealt(files, {name: len(file) for name, file in files.items()}, workers=workers)
    fast = iter([item for item in items if not item.get_closest_marker("slow")])
    for share, size in zip(shares, sizes, strict=True):
        share.extend(islice(fast, max(size - len(share), 0)))
    items[:] = [*chain.from_iterable(shares), *fast]


def dealt(files: dict[str, list[pytest.Item]], costs: dict[str, float], *, workers: int) -> list[list[pytest.Item]]:
    """Whole files by worker, each to the one with the least so far, the costliest first."""
    shares: list[list[pytest.Item]] = [[] for _ in range(workers)]
    busy = [0.0] * workers
    for name in sorted(files, key=costs.__getitem__, reverse=True):
        first_free = busy.index(min(busy))
        shares[first_free] += files[name]
        busy[first_free] += costs[name]
    return shares


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", default=None):  # the controller of xdist's workers collects nothing itself
        pytest_collection_finish()
    elif hasattr(config, "workerinput") and config.getoption("markexpr") != "not slow" and sys.platform == "linux":
        fork_servers_from_here(config)


def fork_servers_from_here(config: pytest.Config) -> None:
    """A worker's server of forks, and the one that comes after a killed one, would import for 6 s of a processor what
    the worker imports in any case. They are forked from it as it is before it collects."""
    from tests.support.commands import NEEDED, take_environment
    from tests.support.forked_python import fork_on_demand

    folder = TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    with warnings.catch_warnings():
        warnings.resetwarnings()  # those of a fresh Python follow, in place of what makes warnings errors
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        for module in NEEDED:
            import_module(module)
        gc.enable()
        sys.dont_write_bytecode = GIVEN
        fork_on_demand(Path(folder.name), take_environment)
        multiprocessing.set_executable(f"{folder.name}/python")
        sys.dont_write_bytecode = False
        gc.disable()


def pytest_collection_finish() -> None:
    sys.dont_write_bytecode = GIVEN
    gc.freeze()
    gc.enable()


# Not before: pytest looks for garbage ten times as it ends. Not at all, and libraries report leaks at Python's end.
atexit.register(gc.unfreeze)


class TorchmetricsFirst(MetaPathFinder):
    """As the command imports Lightning: without the metrics of texts and sounds, and the libraries that they import."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "lightning" and self in sys.meta_path:
            sys.meta_path.remove(self)
            import_torchmetrics()


sys.meta_path.insert(0, TorchmetricsFirst())

Completed = subprocess.CompletedProcess[str]


@pytest.fixture
def run_python() -> Callable[..., Completed]:
    """`run_python(code)` or `run_python("run.py", ...)`: a fresh interpreter in the checkout, or in `cwd`."""

    def run(*args: str, cwd: Path = ROOT, **variables: str) -> Completed:
        command = [sys.executable, "-c", *args] if "\n" in args[0] or " " in args[0] else [sys.executable, *args]
        kept = {key: value for key, value in os.environ.items() if key not in ("COMP_LINE", "HYDRA_FULL_ERROR")}
        env = {**kept, "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled", **variables}
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=PATIENCE_S)

    return run


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused backend steps parameters on the CPU, in Triton's interpreter."""
    if not INTERPRETING:
        pytest.skip("kernels run on this machine's GPU; TRITON_INTERPRET=1 interprets them instead (until 2027-06-30)")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Hydra configures the root logger for a job; its handlers go with the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers[:]:
        if handler not in handlers:
            root.removeHandler(handler)
            handler.close()
    root.handlers[:], root.level = handlers, level


@pytest.fixture(autouse=True)
def decides_for_itself(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision that another test left in the cache is one for other variables of BAOC."""
    monkeypatch.setenv("BAOC_TEST", f"{request.node.nodeid} {os.getpid()} {time.time_ns()}")


@pytest.fixture(autouse=True)
def leaves_torch_as_it_was() -> Iterator[None]:
    """A whole run flushes denormals for its process (training/run.py), which the tests after it must not inherit. A
    dispatch mode that stays on would see every operation of theirs: it ends, and the test that left it fails."""
    yield
    if "torch" in sys.modules:
        from torch.utils import _python_dispatch as dispatch

        sys.modules["torch"].set_flush_denormal(False)
        left = []
        while (mode := dispatch._get_current_dispatch_mode()) is not None:
            left.append(type(mode).__name__)
            mode.__exit__(None, None, None)
        assert not left, f"this test leaves dispatch modes of torch on: {left}"
