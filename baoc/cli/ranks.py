"""The processes of a run on several devices: rank 0 reads the command line and has the folder, the others are told.

`trainer.devices=N` starts N - 1 processes beside this one, which is rank 0, so exit code, signals and locks are as of
one process. Under torchrun or srun the processes are there: each finds its rank, and all but rank 0 wait to be told.
Ranks above 0 write to a temporary folder, which is deleted.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any

import baoc
from baoc.cli.failures import Failure, failure_of, report
from baoc.config.schema import RunConfig
from baoc.core.commands import INTERRUPTED
from baoc.errors import BadInputError, TrainingFailedError
from baoc.parallel import SINGLE_PROCESS, RankInfo, current_rank, is_lost_peer, ranks, refusal

ADDRESS = "127.0.0.1"
FIRST_PORT, PORTS = 15_000, 20_000  # one of these where nobody chose, by the number of the job
ENDING_S = 20.0  # that ranks have to end by themselves when another has failed
GONE = 1  # exit code of a rank that ended because another one did; the first that failed reports why
# On rank 0 of a launcher one entry, whether the configuration was broadcast to the other ranks; elsewhere empty.
_BROADCAST: list[bool] = []


# -- ranks that a launcher has started --------------------------------------------------------------------------------


def join(told: RankInfo) -> int:
    """Makes the process group with the launcher's other processes and returns this one's rank.

    Raises BadInputError where an environment variable is missing.
    """
    environment = rendezvous_environment(told)
    os.environ.update(environment)
    _make_group(None, rank=int(environment["RANK"]), size=int(environment["WORLD_SIZE"]))
    if ranks().rank == 0:
        _BROADCAST[:] = [False]
    return ranks().rank


def is_nonzero_rank() -> bool:
    """True on ranks above 0 of a job that a launcher has started; joins its process group."""
    told = current_rank()
    return told is not None and ranks() is SINGLE_PROCESS and join(told) > 0


def leave(code: int) -> None:
    """Ends rank 0 of a launcher: ranks that still wait for a configuration exit with `code`."""
    if _BROADCAST:
        if not _BROADCAST[0]:
            with suppress(RuntimeError):
                ranks().broadcast(code)
        _BROADCAST.clear()
        _leave_group()


def serve() -> int:
    """Main function of ranks above 0: receives the configuration from rank 0, runs it and returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes of a terminal: rank 0 ends them
    rank = ranks().rank
    try:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            given: Any = ranks().broadcast(None)
            if isinstance(given, int):
                return given
            from baoc.cli.fast_import import import_torchmetrics

            import_torchmetrics()
            from baoc.training.run import run

            run(given[0], run_dir=folder / "runs" / "run", command=given[1])
        return 0
    except BaseException as error:
        if is_lost_peer(error):
            return GONE
        failure = failure_of(error)
        if failure.exit_code != INTERRUPTED:
            report(failure, where=f"rank {rank}: ")
        return failure.exit_code
    finally:
        _leave_group()


def rendezvous_environment(told: RankInfo) -> dict[str, str]:
    """RANK, WORLD_SIZE and what else torch reads: as set by the launcher, or from variables of Slurm and submitit."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    get, found = os.environ.get, {name: os.environ[name] for name in names if name in os.environ}
    if told.source.startswith("srun") and "SLURM_NODELIST" in os.environ:
        of_node = get("SLURM_STEP_TASKS_PER_NODE", get("SLURM_NTASKS_PER_NODE", "")).partition("(")[0]
        host, job = first_host(os.environ["SLURM_NODELIST"]), get("SLURM_JOB_ID", "0")
        given = {"LOCAL_RANK": get("SLURM_LOCALID", told.rank), "LOCAL_WORLD_SIZE": of_node or str(told.size)}
    elif told.source.startswith("submitit"):  # its local executor; under Slurm it is srun
        host, job = ADDRESS, get("SUBMITIT_LOCAL_JOB_ID", "0")
        given = {"LOCAL_RANK": get("SUBMITIT_LOCAL_LOCALID", told.rank)}
    else:
        host, job, given = None, "0", {}
    if host is not None:
        port = FIRST_PORT + (int(job) if job.isdecimal() else 0) % PORTS
        own = {"RANK": told.rank, "WORLD_SIZE": str(told.size), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
        found = {**own, **given, **found}
    if any(name not in found for name in names):
        raise refusal("run", ranks=told)
    return found


def first_host(nodes: str) -> str:
    """The first machine of a list as Slurm writes it, such as `gpu[03-05,9],cpu1`."""
    found = re.match(r"([^,\[]*)(?:\[([^\],-]*))?", nodes)
    return "".join(part or "" for part in found.groups()) if found is not None else nodes


def _make_group(store: Any, *, rank: int, size: int) -> None:
    import torch

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    given: dict[str, Any] = {} if store is None else {"store": store, "rank": rank, "world_size": size}
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", **given)
    ranks()


def _leave_group() -> None:
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# -- ranks that this process starts -----------------------------------------------------------------------------------


@contextmanager
def with_all_ranks(config: RunConfig, *, command: str) -> Iterator[RunConfig]:
    """Inside, this process is rank 0 of all that the run needs, and the others do the same run.

    Raises TrainingFailedError where another rank ended first.
    """
    if _BROADCAST:
        size, devices = ranks().size, config.trainer.devices
        if devices not in (1, size):
            raise BadInputError(
                f"trainer.devices={devices}, but a launcher has started {size} processes: leave it out, or start one"
            )
        config = replace(config, trainer=replace(config.trainer, devices=size))
        _BROADCAST[0] = True
        ranks().broadcast((config, command))
        yield config
    elif config.trainer.devices == 1 or (config.mode == "plan" and config.device not in ("auto", "cpu", "cuda")):
        yield config
    else:
        _refuse_devices(config)
        with _SpawnedRanks(config.trainer.devices) as others, others.explained():
            ranks().broadcast((config, command))
            yield config


def _refuse_devices(config: RunConfig) -> None:
    import torch

    count = torch.cuda.device_count()
    if config.device != "cpu" and 0 < count < config.trainer.devices:
        raise BadInputError(
            f"trainer.devices={config.trainer.devices}, and torch sees {count} CUDA device(s): choose at most {count}, "
            "or device=cpu"
        )


class _SpawnedRanks:
    """The processes of ranks 1 to `size` - 1. They end with the block: those that do not by themselves are killed."""

    def __init__(self, size: int):
        self.size = size
        self.first: tuple[int, int] | None = None  # rank and exit code of the one that failed first
        self._processes: list[subprocess.Popen[bytes]] = []
        self._variables: dict[str, str | None] = {}
        self._ended = threading.Event()

    def __enter__(self) -> "_SpawnedRanks":
        from torch import distributed

        store = distributed.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            ADDRESS, 0, self.size, is_master=True, wait_for_workers=False
        )
        variables = {"WORLD_SIZE": self.size, "LOCAL_WORLD_SIZE": self.size, "MASTER_ADDR": ADDRESS}
        variables |= {"MASTER_PORT": store.port, "RANK": 0, "LOCAL_RANK": 0}
        self._variables = {key: os.environ.get(key) for key in variables}
        os.environ.update({key: str(value) for key, value in variables.items()})
        paths = [str(Path(baoc.__file__).parents[1]), os.environ.get("PYTHONPATH")]
        given = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        try:
            for rank in range(1, self.size):
                own = {**given, "RANK": str(rank), "LOCAL_RANK": str(rank), PARENT: str(os.getpid())}
                words = [sys.executable, "-m", "baoc.cli.ranks"]
                self._processes.append(subprocess.Popen(words, env=own, stdin=subprocess.DEVNULL))
            threading.Thread(target=self._watch, daemon=True).start()
            _make_group(store, rank=0, size=self.size)
        except BaseException:
            self._end(0.0)
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        _leave_group()
        on_all_ranks = isinstance(error, Exception) and getattr(error, "exit_code", 0)
        self._end(ENDING_S if error is None or self.first is not None or on_all_ranks else 2.0)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Replaces the connection errors that follow when another rank ends by one that says which rank, and how."""
        try:
            yield
        except Exception as error:
            if not is_lost_peer(error):
                raise
            raise self._why() from error

    def _why(self) -> TrainingFailedError:
        ends = monotonic() + ENDING_S  # the connection is gone before the process, on a busy machine by seconds
        while self.first is None and monotonic() < ends:
            sleep(0.05)
        failed = TrainingFailedError(_told(self.first) + "; resume=auto goes on from the newest checkpoint")
        if self.first is not None and self.first[1] > 0:
            failed.exit_code = self.first[1]
        return failed

    def _watch(self) -> None:
        """Notes who failed first. Where that leaves this process in a call that never returns, it is ended."""
        while self.first is None and not self._ended.wait(0.1):
            codes = [(rank, process.poll()) for rank, process in enumerate(self._processes, start=1)]
            self.first = next(((rank, code) for rank, code in codes if code), None)
        if self.first is None or self._ended.wait(ENDING_S):
            return
        report(Failure(kind="TrainingFailedError", message=_told(self.first), exit_code=5))
        self._kill()
        os._exit(self.first[1] if self.first[1] > 0 else TrainingFailedError.exit_code)

    def _end(self, patience_s: float) -> None:
        ends = monotonic() + patience_s
        while any(process.poll() is None for process in self._processes) and monotonic() < ends:
            sleep(0.05)
        self._ended.set()
        self._kill()
        for key, value in self._variables.items():
            os.environ.pop(key, None) if value is None else os.environ.update({key: value})

    def _kill(self) -> None:
        for process in self._processes:
            with suppress(OSError):
                process.kill()
            process.wait()


PARENT = "BAOC_RANK_0"  # process id of rank 0, without which the others end


def _told(first: tuple[int, int] | None) -> str:
    if first is None:
        return "the connection to another rank was lost"
    rank, code = first
    if code < 0:
        with suppress(ValueError):
            return f"rank {rank} was ended by {signal.Signals(-code).name}"
    return f"rank {rank} ended with exit code {code}: see its message"


def _follow(parent: int) -> None:
    """Ends this process when rank 0 is gone."""
    while os.getppid() == parent:
        sleep(0.5)
    sleep(ENDING_S)
    os._exit(GONE)


def main(argv: Sequence[str] = ()) -> int:
    """A process that rank 0 started."""
    parent = os.environ.get(PARENT)
    if parent is not None:
        threading.Thread(target=_follow, args=(int(parent),), daemon=True).start()
    from torch import distributed

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        port = int(os.environ["MASTER_PORT"])
        store = distributed.TCPStore(ADDRESS, port, size, False)  # pyright: ignore[reportPrivateImportUsage]
        _make_group(store, rank=rank, size=size)
    except Exception as error:
        if not is_lost_peer(error):
            raise
        return GONE
    return serve()


if __name__ == "__main__":
    sys.exit(main())
