"""The processes of a run on several devices. Rank 0 reads the command line and broadcasts the configuration.

`trainer.devices=N` starts N - 1 processes; this one is rank 0, so that exit code, signals and locks are those of a
single process. Under torchrun or srun the launcher starts all processes: each finds its rank, and all but rank 0 wait
for the configuration. Rank 0 owns the run folder; the others write to a temporary folder, which is deleted.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any

import baoc
from baoc.cli.failures import failure_of, report
from baoc.config.schema import RunConfig
from baoc.core.commands import INTERRUPTED
from baoc.errors import BadInputError, TrainingFailedError
from baoc.parallel import SINGLE_PROCESS, RankInfo, current_rank, is_lost_peer, ranks, refusal

ADDRESS = "127.0.0.1"
# The rendezvous port, if the environment has none: FIRST_PORT + job number modulo NUM_PORTS, the same on all ranks.
FIRST_PORT, NUM_PORTS = 15_000, 20_000
SHUTDOWN_S = 20.0  # seconds in which ranks have to end by themselves when another rank has failed
PEER_LOST_EXIT_CODE = 1  # of a rank that ended because another rank did; the rank that failed first reports the reason
# Of a process that rank 0 has started, after a whole run: 0 is that of an exit in a user's code.
FINISHED_EXIT_CODE = 100
PARENT = "BAOC_RANK_0"  # environment variable with the process id of rank 0, without which the others end
# On rank 0 of a launcher: one entry, whether the configuration was broadcast to the other ranks. Elsewhere empty.
_BROADCAST: list[bool] = []


# -- ranks that a launcher has started --------------------------------------------------------------------------------


def join(rank: RankInfo) -> int:
    """Joins the process group of the launcher's processes and returns this process's rank.

    Sets environment variables that torch reads. Raises BadInputError if one is unknown.
    """
    environment = rendezvous_environment(rank)
    os.environ.update(environment)
    _init_process_group(None, rank=int(environment["RANK"]), size=int(environment["WORLD_SIZE"]))
    if ranks().rank == 0:
        _BROADCAST[:] = [False]
    return ranks().rank


def is_nonzero_rank() -> bool:
    """True on ranks above 0 of a job that a launcher has started. Joins the process group."""
    rank = current_rank()
    return rank is not None and ranks() is SINGLE_PROCESS and join(rank) > 0


def leave(code: int) -> None:
    """Leaves the process group on rank 0 of a launcher. Ranks that still wait for a configuration exit with `code`."""
    if _BROADCAST:
        if not _BROADCAST[0]:
            with suppress(RuntimeError):
                ranks().broadcast(code)
        _BROADCAST.clear()
        _destroy_process_group()


def serve() -> int:
    """Main function of ranks above 0: receives the configuration from rank 0, runs it and returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes of a terminal: rank 0 ends them
    rank = ranks().rank
    try:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            message: Any = ranks().broadcast(None)  # (configuration, command), or an exit code
            if isinstance(message, int):
                return message
            from baoc.cli.fast_import import import_torchmetrics

            import_torchmetrics()
            from baoc.training.run import run

            config, command = message
            run(config, run_dir=folder / "runs" / "run", command=command)
        return 0
    except BaseException as error:
        if is_lost_peer(error):
            return PEER_LOST_EXIT_CODE
        failure = failure_of(error)
        if failure.exit_code == 0:  # of sys.exit() in a user's code, which would count as success
            failure = failure_of(TrainingFailedError("it was left by sys.exit(0) before its end"))
        if failure.exit_code != INTERRUPTED:
            report(failure, where=f"rank {rank}: ")
        return failure.exit_code
    finally:
        _destroy_process_group()


def rendezvous_environment(rank: RankInfo) -> dict[str, str]:
    """The environment variables by which torch makes a process group.

    They are taken from the environment, and where it lacks them from variables of Slurm and submitit. Raises
    BadInputError if one is unknown.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    get, variables = os.environ.get, {name: os.environ[name] for name in names if name in os.environ}
    if rank.source.startswith("srun") and "SLURM_NODELIST" in os.environ:
        node_tasks = get("SLURM_STEP_TASKS_PER_NODE", get("SLURM_NTASKS_PER_NODE", "")).partition("(")[0]
        host, job = first_host(os.environ["SLURM_NODELIST"]), get("SLURM_JOB_ID", "0")
        local = {"LOCAL_RANK": get("SLURM_LOCALID", rank.rank), "LOCAL_WORLD_SIZE": node_tasks or str(rank.size)}
    elif rank.source.startswith("submitit"):  # its local executor; under Slurm the source is srun
        host, job = ADDRESS, get("SUBMITIT_LOCAL_JOB_ID", "0")
        local = {"LOCAL_RANK": get("SUBMITIT_LOCAL_LOCALID", rank.rank)}
    else:
        host, job, local = None, "0", {}
    if host is not None:
        port = FIRST_PORT + (int(job) if job.isdecimal() else 0) % NUM_PORTS
        world = {"RANK": rank.rank, "WORLD_SIZE": str(rank.size), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
        variables = {**world, **local, **variables}
    if any(name not in variables for name in names):
        raise refusal("run", ranks=rank)
    return variables


def first_host(nodes: str) -> str:
    """The first machine of a list in Slurm's notation: `gpu03` of `gpu[03-05,9],cpu1`."""
    match = re.match(r"([^,\[]*)(?:\[([^\],-]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match is not None else nodes


def _init_process_group(store: Any, *, rank: int, size: int) -> None:
    import torch

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if store is None:  # by environment variables
        torch.distributed.init_process_group(backend)
    else:
        torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=size)
    ranks()


def _destroy_process_group() -> None:
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# -- ranks that this process starts -----------------------------------------------------------------------------------


@contextmanager
def with_all_ranks(config: RunConfig, *, command: str) -> Iterator[RunConfig]:
    """Starts the other ranks if the run needs some, and broadcasts the configuration to all. This process is rank 0.

    Yields the configuration with the number of devices. Raises TrainingFailedError if another rank ended first.
    """
    if _BROADCAST:
        size, devices = ranks().size, config.trainer.devices
        if devices not in (1, size):
            raise BadInputError(
                f"trainer.devices={devices}, but a launcher has started {size} processes: leave it out, or start one"
            )
        config = replace(config, trainer=replace(config.trainer, devices=size))
        _BROADCAST[0] = True
        with _naming_lost_ranks(lambda: None):
            ranks().broadcast((config, command))
            yield config
    elif config.trainer.devices == 1 or (config.mode == "plan" and config.device not in ("auto", "cpu", "cuda")):
        yield config
    else:
        import torch

        devices, count = config.trainer.devices, torch.cuda.device_count()
        if config.device != "cpu" and 0 < count < devices:
            raise BadInputError(
                f"trainer.devices={devices}, and torch sees {count} CUDA device(s): choose at most {count}, or "
                "device=cpu"
            )
        with _SpawnedRanks(devices) as others, _naming_lost_ranks(others.wait_for_failure):
            ranks().broadcast((config, command))
            yield config


class _SpawnedRanks:
    """Starts the processes of ranks 1 to `size` - 1. At the end of the block it waits for them, then kills them."""

    def __init__(self, size: int):
        self.size = size
        self.first_failure: tuple[int, int] | None = None  # (rank, exit code)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._old_variables: dict[str, str | None] = {}  # values of environment variables that this class sets
        self._ended = threading.Event()

    def __enter__(self) -> "_SpawnedRanks":
        from torch import distributed

        store = distributed.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            ADDRESS, 0, self.size, is_master=True, wait_for_workers=False
        )
        variables = {"WORLD_SIZE": self.size, "LOCAL_WORLD_SIZE": self.size, "MASTER_ADDR": ADDRESS}
        variables |= {"MASTER_PORT": store.port, "RANK": 0, "LOCAL_RANK": 0}
        self._old_variables = {key: os.environ.get(key) for key in variables}
        os.environ.update({key: str(value) for key, value in variables.items()})
        paths = [str(Path(baoc.__file__).parents[1]), os.environ.get("PYTHONPATH")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        environment[PARENT] = str(os.getpid())
        try:
            for rank in range(1, self.size):
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                command = [sys.executable, "-m", "baoc.cli.ranks"]
                self._processes.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
            threading.Thread(target=self._watch, daemon=True).start()
            _init_process_group(store, rank=0, size=self.size)
        except BaseException:
            self._end(0.0)
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        _destroy_process_group()
        raised_on_all_ranks = isinstance(error, Exception) and getattr(error, "exit_code", 0)
        others_will_end = error is None or self.first_failure is not None or raised_on_all_ranks
        self._end(SHUTDOWN_S if others_will_end else 2.0)

    def wait_for_failure(self) -> tuple[int, int] | None:
        """`first_failure`: a connection ends before its process, on a busy machine by seconds."""
        deadline = monotonic() + SHUTDOWN_S
        while self.first_failure is None and monotonic() < deadline:
            sleep(0.05)
        return self.first_failure

    def _watch(self) -> None:
        """Runs in a thread: records the first failure, and exits if this process then hangs for SHUTDOWN_S."""
        while self.first_failure is None and not self._ended.wait(0.1):
            codes = [(rank, process.poll()) for rank, process in enumerate(self._processes, start=1)]
            failed = [(rank, code) for rank, code in codes if code not in (None, FINISHED_EXIT_CODE)]
            self.first_failure = min(failed, key=lambda each: each[1] == PEER_LOST_EXIT_CODE, default=None)
        if self.first_failure is None or self._ended.wait(SHUTDOWN_S):
            return
        report(failed := failure_of(_error_of(self.first_failure)))
        self._kill()
        os._exit(failed.exit_code)

    def _end(self, patience_s: float) -> None:
        """Waits `patience_s` for the processes, kills them, and restores the environment."""
        deadline = monotonic() + patience_s
        while any(process.poll() is None for process in self._processes) and monotonic() < deadline:
            sleep(0.05)
        self._ended.set()
        self._kill()
        for key, value in self._old_variables.items():
            os.environ.pop(key, None) if value is None else os.environ.update({key: value})

    def _kill(self) -> None:
        for process in self._processes:
            with suppress(OSError):
                process.kill()
            process.wait()


@contextmanager
def _naming_lost_ranks(failure: Callable[[], tuple[int, int] | None]) -> Iterator[None]:
    """Replaces the connection error that follows the end of another rank by one that names this rank."""
    try:
        yield
    except Exception as error:
        if not is_lost_peer(error):
            raise
        raise _error_of(failure()) from error


def _error_of(failure: tuple[int, int] | None) -> TrainingFailedError:
    """The error of rank 0 that another rank has ended; it has that rank's exit code. None: it is not known which."""
    text, code = "the connection to another rank was lost", 0
    if failure is not None:
        rank, code = failure
        text = f"rank {rank} ended with exit code {code}{': see its message' if code else ' too early'}"
        with suppress(ValueError):  # -code is no signal
            text = f"rank {rank} was ended by {signal.Signals(-code).name}"
    error = TrainingFailedError(f"{text}; resume=auto goes on from the newest checkpoint")
    error.exit_code = code if code > 0 else error.exit_code
    return error


def _exit_with_parent(parent: int) -> None:
    """Runs in a thread: ends this process SHUTDOWN_S after rank 0 is gone."""
    while os.getppid() == parent:
        sleep(0.5)
    sleep(SHUTDOWN_S)
    os._exit(PEER_LOST_EXIT_CODE)


def main(argv: Sequence[str] = ()) -> int:
    """Main function of the processes that rank 0 starts."""
    parent = os.environ.get(PARENT)
    if parent is not None:
        threading.Thread(target=_exit_with_parent, args=(int(parent),), daemon=True).start()
    from torch import distributed

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        port = int(os.environ["MASTER_PORT"])
        store = distributed.TCPStore(ADDRESS, port, size, False)  # pyright: ignore[reportPrivateImportUsage]
        _init_process_group(store, rank=rank, size=size)
    except Exception as error:
        if not is_lost_peer(error):
            raise
        return PEER_LOST_EXIT_CODE
    return serve() or FINISHED_EXIT_CODE


if __name__ == "__main__":
    sys.exit(main())
