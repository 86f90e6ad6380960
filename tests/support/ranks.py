"""Real processes of one group on gloo, for tests: what each returns comes back by rank."""

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.spawn import get_executable
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing as mp

from tests.support.commands import take_environment, with_server
from tests.support.waiting import PATIENCE_S


@contextmanager
def group(rank: int, size: int, *, store: Path) -> Iterator[None]:
    """This process in a group that meets at the file `store`."""
    limit = timedelta(seconds=PATIENCE_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    try:
        yield
    finally:
        dist.destroy_process_group()


def forked_from_here() -> bool:
    """Whether servers of forks are forks of this process (tests/conftest.py), with what it has imported."""
    return os.fsdecode(get_executable()) != sys.executable


def in_processes(work: Callable[[int, int, Path], Any], *, size: int = 2, fresh: bool = False) -> list[Any]:
    """`work(rank, size, store)` of a module's top level in `size` processes; what they return, or the first error.

    `store` is for a `group` of them, which `work` makes. `fresh` ones are forks of a process that imports all anew, for
    variables that count at an import.
    """
    with_server()
    with tempfile.TemporaryDirectory() as folder:
        given = (size, Path(folder), dict(os.environ), work)
        if fresh:
            kept = get_executable()
            mp.set_executable(sys.executable)
            context = mp.start_processes(_fork, args=given, nprocs=1, start_method="spawn", join=False)
            mp.set_executable(kept)
        else:
            context = mp.start_processes(_work, args=given, nprocs=size, start_method="forkserver", join=False)
        assert context is not None
        ends = monotonic() + PATIENCE_S
        try:
            while not context.join(timeout=1.0):
                assert monotonic() < ends, f"processes were not done after {PATIENCE_S} s"
        finally:
            for process in context.processes:
                if process.is_alive():
                    with suppress(ProcessLookupError):  # ranks that it has forked, else there is no such group
                        os.killpg(process.pid, signal.SIGKILL)
                    process.kill()
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _fork(_: int, size: int, *given: Any) -> None:
    os.setsid()
    mp.start_processes(_work, args=(size, *given), nprocs=size, start_method="fork")


def _work(
    rank: int, size: int, folder: Path, environment: dict[str, str], work: Callable[[int, int, Path], Any]
) -> None:
    take_environment(environment)
    torch.set_num_threads(1)
    torch.save(work(rank, size, folder / "store"), folder / f"{rank}.pt")


@contextmanager
def as_launched(rank: int, size: int) -> Iterator[None]:
    """The variables by which a launcher of one machine tells a process of its rank; Lightning goes by them."""
    given = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    before = {key: os.environ.get(key) for key in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key, None) if value is None else os.environ.update({key: value})
