"""What all tests share: hypothesis without clocks, and a fresh interpreter for what must hold at import."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.examples import load_profile
from tests.support.interpreting import INTERPRETING
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE_S

load_profile()

# The native optimizer step is compiled into the checkout's own cache, not into the user's.
os.environ.setdefault("BAOC_CACHE", str(ROOT / ".pytest_cache" / "baoc"))

# Workers side by side share the cores; each with threads for all of them would make every one slower.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

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


@pytest.fixture(autouse=True)
def decides_for_itself(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision that another test left in the cache is one for other variables of BAOC."""
    monkeypatch.setenv("BAOC_TEST", f"{request.node.nodeid} {os.getpid()} {time.time_ns()}")


@pytest.fixture(autouse=True)
def keeps_denormals() -> Iterator[None]:
    """A whole run flushes denormals for its process (tasks/cpu.py); the tests after it must not inherit that."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)
