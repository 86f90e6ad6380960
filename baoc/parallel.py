"""Collectives over ranks, the refusals of what several ranks cannot do, and how a process learns its rank.

`ranks()` returns the process group, or `SINGLE_PROCESS`, whose collectives return their argument: callers need no
branch for one process. `REFUSED` lists what is not supported on several ranks, with its message. The module does not
import torch, only finds it in `sys.modules`: a process that has not loaded torch has no process group.
"""

import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from time import monotonic
from traceback import print_exception
from typing import Any, TypeVar

from baoc.errors import BadInputError, BudgetBreachedError, CalledAloneError, TrainingFailedError

T = TypeVar("T")

# Launcher, and its environment variables of the world size and of the rank. accelerate and deepspeed set torchrun's.
LAUNCHERS = (
    ("torchrun", "WORLD_SIZE", "RANK"),
    ("torchrun", "WORLD_SIZE", "LOCAL_RANK"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpirun", "PMI_SIZE", "PMI_RANK"),
    ("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    ("submitit", "SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_GLOBALID"),
)
_INTERACTIVE = ("bash", "interactive")  # names of Slurm jobs that are a shell; the same as Lightning's
PEER_TIMEOUT_S = 20.0  # that a rank with an error waits for ranks that may hang in a collective of the same step
# That a call of all ranks waits for those that come late, as they still read a checkpoint or validate. The same as
# NCCL's own limit, beyond which the collectives of a step fail too.
MEETING_TIMEOUT_S = 600.0

REFUSED = {
    "run": (
        "a run was started as {ranks}, where no process knows all of its numbers: each would train alone on all of the "
        "data. Start it once with trainer.devices=N, by torchrun --nproc-per-node N, or by srun --ntasks N"
    ),
    "multirun": (
        "-m was started as {ranks}: several runs side by side need no ranks. Start it once, without a launcher of "
        "ranks; trainer.devices=N gives each run N of them"
    ),
    "study": (
        "a study was started as {ranks}: each would work on it alone. Start it once per worker, without a launcher of "
        "ranks; hydra.sweeper.gpus_per_trial=N gives each trial N of its own"
    ),
    "race": (
        "a race was started as {ranks}: each would hold it alone. Race in one process (mode=race, without a launcher "
        "of ranks), then train with recipe=raced"
    ),
    "strategy": (
        "BaocStrategy was built in {ranks}: it trains on one device, and each process would train alone on all of the "
        "data. Use BaocDDPStrategy or, for fully_shard, BaocFSDPStrategy, which take the same arguments, or start one "
        "process"
    ),
    "optimizer": (
        "BaocOptimizer was built in {ranks} before torch.distributed.init_process_group: each would plan by its own "
        "memory, clock and gradients, so that plans and weights differ. Call that first, then wrap the module in "
        "DistributedDataParallel"
    ),
    "decision": (
        "a plan that BAOC made in a process alone is stepped in {ranks}: each would decide anew by its own clock and "
        "gradients, so that plans and weights differ. Call torch.distributed.init_process_group before it is made"
    ),
    "release": (
        "gradient release was asked for in {ranks}: it steps before gradients are averaged over them. Train in one "
        "process, or without release"
    ),
    "last_backward": (
        "optimizer.last_backward() was entered in {ranks}: it steps host-placed blocks before gradients are averaged "
        "over them. Train in one process, or leave it out"
    ),
    "placement": (
        "{name} is a DTensor of placements {placements}: what is stepped in parts is what fully_shard cuts along its "
        "first dimension. Leave out tensor parallelism and shard_placement_fn"
    ),
    "edges": (
        "{name} of shape {shape} cannot run {spec} on {size} ranks: their parts of it would end within groups of its "
        "codec. Take a number of ranks that divides {parts}, or a spec that keeps fp32 states"
    ),
    "unequal": (
        "{what} is {first} on rank 0 and {other} on rank {rank}, so that ranks would part or wait for each other: "
        "give all ranks the same module, data, settings and checkpoint"
    ),
    "alone": (
        "{what} was called on rank {rank}, and not on all others within {seconds} s: either they do not call it, or "
        "are that late, as after a checkpoint or a validation of their own. Call it on all ranks, at the same place of "
        "the loop, and end before it what one rank does alone for longer"
    ),
    "offloaded": (
        "{name} was offloaded to the CPU by fully_shard, whose weights would be copied for every step of theirs: leave "
        "out CPUOffloadPolicy, and choose specs of fewer bytes such as adamw_int8"
    ),
    "meshes": "{name} and {other} are cut over different ranks: build one optimizer for each mesh of fully_shard",
    "sharded_late": "{name} was cut by fully_shard after its optimizer was built: call fully_shard first",
    "sharded_copy": (
        "an optimizer of parameters that fully_shard cuts cannot be copied or pickled: they are the process group's. "
        "Save its state_dict()"
    ),
    "sharded_budget": (
        "budget {budget} was given for a module that fully_shard cuts, where {why}. Give a share of state, such as "
        "state_25, or a budget of memory with probe="
    ),
    "averaged_narrow": (
        "task.ema_decay averages weights, of which precision={precision} keeps 16 bits and a rank has only rows under "
        "fully_shard: set trainer.precision=bf16-mixed, task.ema_decay=0, or trainer.strategy=ddp"
    ),
    "left_whole": (
        "BaocFSDPStrategy trains parameters that are cut over its ranks, and {names} are left whole: call fully_shard "
        "on the module that has them, last of all, in configure_model, or use BaocDDPStrategy"
    ),
    "fsdp1": (
        "{name} is a flat part of FullyShardedDataParallel, which no block can be made of: use fully_shard, which "
        "leaves parameters as they are, or DistributedDataParallel"
    ),
    "zero": (
        "ZeroRedundancyOptimizer builds {name} of a part of the parameters: it would save checkpoints without states. "
        "Build {name} itself, with a spec of fewer bytes such as adamw_int8"
    ),
    "cast_ddp": (
        "block {block} cannot take {spec} now: that makes {name} {dtype}, and DistributedDataParallel, which has it "
        "already, would no longer average its gradients. Build the optimizer before DistributedDataParallel, or choose "
        "specs that keep weights as they are"
    ),
    "cast_hooks": (
        "block {block} cannot take {spec} now: that makes {name} {dtype}, and the {count} hook(s) on its "
        "AccumulateGrad node would be lost. Register them after the optimizer is built (or with "
        "Tensor.register_post_accumulate_grad_hook, which stays), or choose specs that keep weights as they are"
    ),
    "averaged": (
        "AveragedModel would average block {block} without the last bits of its weights, which {spec} keeps beside "
        "them. Average optimizer.export_weights() instead, or choose specs that keep weights as they are"
    ),
}  # fmt: skip


def refusal(key: str, **facts: object) -> BadInputError:
    """The error with the message `REFUSED[key]`, formatted with `facts`."""
    return BadInputError(REFUSED[key].format(**facts))


# -- collectives ------------------------------------------------------------------------------------------------------


class Ranks:
    """The processes of a run; this base class is a run of one. Every method is a collective: all ranks call it, in the
    same order."""

    rank, size = 0, 1

    def all_reduce_max(self, *numbers: float) -> tuple[float, ...]:
        """The maximum over ranks of each number."""
        return numbers

    def all_gather_number(self, number: float) -> tuple[float, ...]:
        """Every rank's number, in rank order. Numbers must not be negative. Cheaper than `all_gather`."""
        return self.all_reduce_max(*(number if rank == self.rank else 0.0 for rank in range(self.size)))

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, pickled, in rank order."""
        return [value]

    def broadcast_number(self, number: float) -> float:
        """Rank 0's number. Cheaper than `broadcast`."""
        return self.all_reduce_max(number if self.rank == 0 else -inf)[0]

    def broadcast(self, value: T) -> T:
        """Rank 0's value, pickled."""
        return value

    def broadcast_tensors(self, tensors: Iterable[Any]) -> None:
        """Overwrites the tensors of all ranks with rank 0's values."""

    def broadcast_result(self, make: Callable[[], T], *, for_others: Callable[[T], T] | None = None) -> T:
        """Calls `make` on rank 0 alone and returns its result on all ranks, or raises its error on all.

        `for_others` reduces the result to what the other ranks need, before it is sent.
        """
        return make()

    def run_or_raise_on_all(self, make: Callable[[], T], *, has_collectives: bool = False) -> T:
        """Calls `make` on every rank and returns its own result; if it fails on any rank, all ranks raise.

        A rank raises its own Exception, or else that of the lowest rank with one. `has_collectives`: `make` calls
        collectives itself, as forward does under fully_shard. Other ranks may then hang inside it, so a rank with an
        error waits for them for as long as its own call took and PEER_TIMEOUT_S at most.
        """
        return make()

    def meet(self, what: str) -> None:
        """Raises CalledAloneError if some ranks call `what` and others do not within MEETING_TIMEOUT_S."""


SINGLE_PROCESS = Ranks()


class ProcessGroupRanks(Ranks):
    """torch's default process group. A gloo group beside it carries numbers, objects and CPU tensors."""

    def __init__(self, distributed: Any):
        self._dist, self._torch = distributed, sys.modules["torch"]
        self.rank, self.size = int(distributed.get_rank()), int(distributed.get_world_size())
        self._gloo = distributed.new_group(backend="gloo")
        limit = timedelta(seconds=MEETING_TIMEOUT_S)
        self._meetings = distributed.new_group(backend="gloo", timeout=limit)  # of `meet`, which some may not reach

    def __reduce__(self) -> Any:  # of an optimizer's copy
        return ranks, ()

    def all_reduce_max(self, *numbers: float) -> tuple[float, ...]:
        tensor = self._torch.tensor(numbers, dtype=self._torch.float64)
        self._dist.all_reduce(tensor, op=self._dist.ReduceOp.MAX, group=self._gloo)
        return tuple(tensor.tolist())

    def all_gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        self._dist.all_gather_object(values, value, group=self._gloo)
        return values

    def broadcast(self, value: T) -> T:
        values = [value if self.rank == 0 else None]
        self._dist.broadcast_object_list(values, 0, group=self._gloo)
        return values[0]  # pyright: ignore[reportReturnType]

    def broadcast_tensors(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            self._dist.broadcast(tensor.detach(), 0, group=self._gloo if tensor.device.type == "cpu" else None)

    def broadcast_result(self, make: Callable[[], T], *, for_others: Callable[[T], T] | None = None) -> T:
        made: Any = _result_or_error(make) if self.rank == 0 else (None, None)
        result, error = made
        sent = result
        if for_others is not None and self.rank == 0 and error is None:
            sent = for_others(result)
        received, packed = self.broadcast((sent, _pack(error)))
        if packed is not None:
            raise error or _unpack(packed)
        return result if self.rank == 0 else received

    def run_or_raise_on_all(self, make: Callable[[], T], *, has_collectives: bool = False) -> T:
        began = monotonic()
        result, error = _result_or_error(make)
        took_s = monotonic() - began
        failed = self._torch.tensor([error is not None], dtype=self._torch.int64)
        timed = has_collectives and error is not None
        if timed:  # of the group, as a mere wait would leave a thread in it, for which the end of this process waits
            self._set_timeout(timedelta(seconds=took_s + PEER_TIMEOUT_S))
        try:
            self._dist.all_reduce(failed, op=self._dist.ReduceOp.MAX, group=self._gloo)
        except RuntimeError as unheard:
            if error is None:  # another rank is gone
                raise
            if not _timed_out(unheard):
                raise error from unheard
            # Not the error's own class: callers may go on from that one, while the others hang in this step.
            in_step = f"in a step that the others are in the middle of ({error})"
            if type(error).__name__ == "OutOfMemoryError":
                advice = "lower micro_batch, or give a larger budget"
                raise BudgetBreachedError(f"rank {self.rank} alone ran out of memory, {in_step}: {advice}") from error
            print_exception(error)
            raise TrainingFailedError(f"rank {self.rank} alone failed, {in_step}") from error
        finally:
            if timed:
                self._set_timeout(self._dist.constants.default_pg_timeout)
        if not failed.item():
            return result
        errors = [packed for packed in self.all_gather(_pack(error)) if packed is not None]
        raise error or _unpack(errors[0])

    def _set_timeout(self, limit: timedelta) -> None:
        self._dist.distributed_c10d._set_pg_timeout(limit, self._gloo)

    def meet(self, what: str) -> None:
        try:
            self._dist.all_reduce(self._torch.zeros(1), group=self._meetings)
        except RuntimeError as error:
            if _timed_out(error):
                told = REFUSED["alone"].format(what=what, rank=self.rank, seconds=f"{MEETING_TIMEOUT_S:g}")
                raise CalledAloneError(told) from error
            raise RuntimeError(  # with its words, by which `is_lost_peer` knows it
                f"{what} was called on rank {self.rank} when another rank had left: it ended, or had waited for this "
                f"one for {MEETING_TIMEOUT_S:g} s, see its own error ({error})"
            ) from error


def ranks() -> Ranks:
    """The default process group, or SINGLE_PROCESS. The first call in a new group is a collective."""
    if (distributed := _distributed()) is None:
        return SINGLE_PROCESS
    default = distributed.group.WORLD
    if not _newest_group or _newest_group[0][0] is not default:
        _newest_group[:] = [(default, ProcessGroupRanks(distributed))]
    return _newest_group[0][1]


_newest_group: list[tuple[Any, ProcessGroupRanks]] = []  # at most one: torch's default group, and its ranks


def local_world_size(world_size: int) -> int:
    """How many of `world_size` ranks run on this machine."""
    return min(world_size, _int_variable(os.environ, "LOCAL_WORLD_SIZE") or world_size)


def check_equal_on_ranks(number: float, *, what: str, among: Ranks) -> None:
    """Raises TrainingFailedError on all ranks unless all have the same number."""
    high, low = among.all_reduce_max(number, -number)
    if high != -low:
        raise TrainingFailedError(f"{what} differ between ranks, which is a bug: please report it")


def check_same_on_ranks(given: Mapping[str, object], *, among: Ranks) -> None:
    """Raises BadInputError on all ranks if one of them was given another value of anything than rank 0."""
    first, *others = among.all_gather(dict(_flat(given)))
    for rank, other in enumerate(others, start=1):
        for what in first | other:
            texts = [each.get(what, "missing") for each in (first, other)]
            if texts[0] != texts[1]:
                at = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
                begin = max(at - 40, 0) if max(map(len, texts)) > 80 else 0
                one, another = (_excerpt(text, begin=begin) for text in texts)
                raise refusal("unequal", what=what, first=one, rank=rank, other=another)


def _excerpt(text: str, *, begin: int) -> str:
    end = begin + 80
    return f"{'...' if begin else ''}{text[begin:end]}{'...' if len(text) > end else ''}"


def _flat(given: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Values as text by their path, such as `budget.name`."""
    for key, value in given.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", str(value)


def is_lost_peer(error: BaseException) -> bool:
    """True if a collective failed because another rank is gone."""
    return any(kind.__name__ == "DistError" for kind in type(error).__mro__) or (
        isinstance(error, RuntimeError) and any(words in str(error).lower() for words in ("closed by peer", "/gloo/"))
    )


def _timed_out(error: RuntimeError) -> bool:
    """True if a collective of gloo's waited as long as it may, or follows one that has."""
    return any(words in str(error).lower() for words in ("timed out", "application timeout"))


def _result_or_error(make: Callable[[], T]) -> tuple[Any, Exception | None]:
    try:
        return make(), None
    except Exception as error:
        return None, error


def _pack(error: Exception | None) -> tuple[type, tuple[Any, ...], dict[str, Any]] | None:
    """An error's class, arguments and attributes: an error with keyword-only arguments cannot be pickled itself."""
    if error is None:
        return None
    packed = type(error), error.args, dict(error.__dict__)
    try:
        pickle.dumps(packed)
    except Exception:  # a user's class may hold anything
        return TrainingFailedError, (f"{type(error).__name__}: {error}",), {}
    return packed


def _unpack(packed: tuple[type, tuple[Any, ...], dict[str, Any]]) -> Exception:
    kind, args, attributes = packed
    error: Any = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(attributes)
    return error


def _distributed() -> Any:
    """torch.distributed if it has a process group of several ranks, else None."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed if distributed.get_world_size() > 1 else None


# -- the rank of this process -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """The rank of this process, "?" if unknown; the world size, None if unknown; and which launcher tells them."""

    rank: str
    size: int | None
    source: str

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size or 'several'} processes ({self.source})"


def refuse_several_processes(key: str) -> None:
    """Raises the refusal `REFUSED[key]` if this process is one of several."""
    info = current_rank()
    if info is not None:
        raise refusal(key, ranks=info)


def current_rank(environment: Mapping[str, str] = os.environ) -> RankInfo | None:
    """The rank by the process group or a launcher's variables; None for a process by itself.

    A rank above 0 is one of several, even if no variable has the world size.
    """
    return _rank_in_group() or _rank_in_slurm(environment) or _rank_of_launcher(environment)


def _rank_in_group() -> RankInfo | None:
    if (distributed := _distributed()) is None:
        return None
    return RankInfo(rank=str(distributed.get_rank()), size=distributed.get_world_size(), source="torch.distributed")


def _rank_in_slurm(environment: Mapping[str, str]) -> RankInfo | None:
    """The rank of a task of an srun step. A batch script or interactive shell has the same variables but no task."""
    rank = _int_variable(environment, "SLURM_PROCID")
    step = any(key in environment for key in ("SLURM_STEP_ID", "SLURM_STEPID"))
    if rank is None or not (step or rank > 0) or environment.get("SLURM_JOB_NAME") in _INTERACTIVE:
        return None
    for size in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        if size in environment:
            return _rank_info(rank, _int_variable(environment, size), source=f"srun: {size}")
    return _rank_info(rank, None, source="srun: SLURM_PROCID")


def _rank_of_launcher(environment: Mapping[str, str]) -> RankInfo | None:
    for launcher, size, rank in LAUNCHERS:
        source = f"{launcher}: {size if size in environment else rank}"
        info = _rank_info(_int_variable(environment, rank), _int_variable(environment, size), source=source)
        if info is not None:
            return info
    return None


def _rank_info(rank: int | None, size: int | None, *, source: str) -> RankInfo | None:
    """None for rank 0 (or an unknown one) of one process (or of an unknown number)."""
    if (size or 1) == 1 and not rank:
        return None
    return RankInfo(rank="?" if rank is None else str(rank), size=size if size != 1 else None, source=source)


def _int_variable(environment: Mapping[str, str], key: str) -> int | None:
    value = environment.get(key, "")
    return int(value) if value.isdecimal() else None


# -- wrapped modules --------------------------------------------------------------------------------------------------


def unwrapped(module: Any) -> Any:
    """The network inside the wrappers of torch.compile, DistributedDataParallel and DataParallel."""
    parallel: Any = sys.modules.get("torch.nn.parallel")
    wrappers = (parallel.DistributedDataParallel, parallel.DataParallel) if parallel is not None else ()
    while True:
        inner = module.module if isinstance(module, wrappers) else getattr(module, "_orig_mod", None)
        if not hasattr(inner, "named_parameters"):
            return module
        module = inner


def unwrapped_name(name: str) -> str:
    """A parameter's name without the prefixes of torch.compile and of wrappers such as DistributedDataParallel."""
    return name.replace("_orig_mod.", "").removeprefix("module.")
