"""Whether this process is one of several, what ranks agree on, and what is refused: the only place that knows of ranks.

`ranks()` is the process group, or `ALONE`, whose answers are what it is asked: code of one process has no branches for
several. Each row of `REFUSED` is one thing that is not done there yet, and goes when it is. torch is looked at where it
is loaded already: what has not loaded it has no process group.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from baoc.errors import BadInputError, BudgetBreachedError, TrainingFailedError

T = TypeVar("T")

# Who starts processes, and the variables of their number and of this one's. accelerate and deepspeed set torchrun's.
LAUNCHERS = (
    ("torchrun", "WORLD_SIZE", "RANK"),
    ("torchrun", "WORLD_SIZE", "LOCAL_RANK"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpirun", "PMI_SIZE", "PMI_RANK"),
    ("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    ("submitit", "SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_GLOBALID"),
)
_INTERACTIVE = ("bash", "interactive")  # names of Slurm jobs that are a shell; Lightning goes by the same

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
    "offloaded": (
        "{name} was offloaded to the CPU by fully_shard, whose weights would be copied for every step of theirs: leave "
        "out CPUOffloadPolicy, and choose specs of fewer bytes such as adamw_int8"
    ),
    "meshes": (
        "{name} and {other} are cut over different ranks: build one optimizer for each mesh of fully_shard"
    ),
    "sharded_late": (
        "{name} was cut by fully_shard after its optimizer was built: call fully_shard first"
    ),
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


def refusal(row: str, **facts: object) -> BadInputError:
    """What `REFUSED` says of `row`, with its facts in place."""
    return BadInputError(REFUSED[row].format(**facts))


# -- what ranks agree on ----------------------------------------------------------------------------------------------


class Ranks:
    """The processes of a run; here one alone. Every method is a collective: all ranks call it, in one order."""

    rank, size = 0, 1

    def most(self, *numbers: float) -> tuple[float, ...]:
        """Each number's largest over ranks."""
        return numbers

    def each(self, number: float) -> tuple[float, ...]:
        """Every rank's number, which is not below 0, in their order: one small message."""
        return (number,)

    def first_number(self, number: float) -> float:
        """Rank 0's number, at the price of one small message."""
        return number

    def first(self, value: T) -> T:
        """Rank 0's value."""
        return value

    def from_first(self, make: Callable[[], T], *, told: Callable[[T], T] | None = None) -> T:
        """What `make` returns on rank 0, which alone calls it; all ranks raise what it raises. `told` makes of it what
        the others are given, where they can do with less."""
        return make()

    def gathered(self, value: T) -> list[T]:
        """Every rank's value, in their order."""
        return [value]

    def agreed(self, make: Callable[[], T], *, in_step: bool = False) -> T:
        """What `make` returns here. Where it raises an Exception on any rank, all ranks raise that of the first such
        one, or their own. With `in_step` ranks wait for each other in `make`, as where parameters are sharded: one
        with an error waits PATIENCE_S for them to hear of it."""
        return make()

    def share(self, tensors: Iterable[Any]) -> None:
        """Puts rank 0's numbers into the tensors of all."""


ALONE = Ranks()
PATIENCE_S = 120.0  # that a rank with an error waits for others in mid-step to hear of it


class Group(Ranks):
    """torch's default process group, with one of gloo beside it for numbers, objects and tensors of the CPU."""

    def __init__(self, distributed: Any):
        self._dist, self._torch = distributed, sys.modules["torch"]
        self.rank, self.size = int(distributed.get_rank()), int(distributed.get_world_size())
        self._gloo = distributed.new_group(backend="gloo")

    def most(self, *numbers: float) -> tuple[float, ...]:
        held = self._torch.tensor(numbers, dtype=self._torch.float64)
        self._dist.all_reduce(held, op=self._dist.ReduceOp.MAX, group=self._gloo)
        return tuple(held.tolist())

    def each(self, number: float) -> tuple[float, ...]:
        return self.most(*(number if rank == self.rank else 0.0 for rank in range(self.size)))

    def first_number(self, number: float) -> float:
        held = self._torch.tensor([number], dtype=self._torch.float64)
        self._dist.broadcast(held, 0, group=self._gloo)
        return held.item()

    def first(self, value: T) -> T:
        held = [value if self.rank == 0 else None]
        self._dist.broadcast_object_list(held, 0, group=self._gloo)
        return held[0]  # pyright: ignore[reportReturnType]

    def from_first(self, make: Callable[[], T], *, told: Callable[[T], T] | None = None) -> T:
        done: tuple[Any, Exception | None] = _tried(make) if self.rank == 0 else (None, None)
        given: Any = done[0]
        if told is not None and self.rank == 0 and done[1] is None:
            given = told(given)
        result, error = self.first((given, _packed(done[1])))
        if error is not None:
            raise done[1] or _unpacked(error)
        return done[0] if self.rank == 0 else result  # pyright: ignore[reportReturnType]

    def gathered(self, value: T) -> list[T]:
        held: list[Any] = [None] * self.size
        self._dist.all_gather_object(held, value, group=self._gloo)
        return held

    def agreed(self, make: Callable[[], T], *, in_step: bool = False) -> T:
        result, own = _tried(make)
        failed = self._torch.tensor([own is not None], dtype=self._torch.int64)
        told = self._dist.all_reduce(failed, op=self._dist.ReduceOp.MAX, group=self._gloo, async_op=True)
        try:
            told.wait(timedelta(seconds=PATIENCE_S)) if in_step and own is not None else told.wait()
        except RuntimeError:
            if own is None:
                raise
            if type(own).__name__ != "OutOfMemoryError":
                raise own from None
            raise BudgetBreachedError(  # which nothing smaller is tried after: the others wait in mid-step
                f"rank {self.rank} alone ran out of memory, in a step that the others are in the middle of ({own}): "
                "lower micro_batch, or give a larger budget"
            ) from own
        if not failed.item():
            return result
        others = [error for error in self.gathered(_packed(own)) if error is not None]
        raise own or _unpacked(others[0])

    def share(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            self._dist.broadcast(tensor.detach(), 0, group=self._gloo if tensor.device.type == "cpu" else None)


def ranks() -> Ranks:
    """The process group that this process is in with others, or ALONE. The first call in a group is a collective."""
    distributed = _distributed()
    if distributed is None or distributed.get_world_size() == 1:
        return ALONE
    default = distributed.group.WORLD
    if not _groups or _groups[0][0] is not default:
        _groups[:] = [(default, Group(distributed))]
    return _groups[0][1]


_groups: list[tuple[Any, Group]] = []  # the newest default group, and what was made of it


def local_size(size: int) -> int:
    """How many of `size` ranks are on this machine."""
    return min(size, _number(os.environ, "LOCAL_WORLD_SIZE") or size)


def check_same(number: float, *, what: str, among: Ranks) -> None:
    """Raises TrainingFailedError on all ranks where they do not have the same number, of which a bug is the cause."""
    high, low = among.most(number, -number)
    if high != -low:
        raise TrainingFailedError(f"{what} differ between ranks, which is a bug: please report it")


def _tried(make: Callable[[], T]) -> tuple[Any, Exception | None]:
    try:
        return make(), None
    except Exception as error:
        return None, error


def _packed(error: Exception | None) -> tuple[type, tuple[Any, ...], dict[str, Any]] | None:
    """An error without its frames: arguments by keyword keep some from being pickled as they are."""
    return None if error is None else (type(error), error.args, dict(error.__dict__))


def _unpacked(packed: tuple[type, tuple[Any, ...], dict[str, Any]]) -> Exception:
    kind, args, attributes = packed
    error: Any = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(attributes)
    return error


def _distributed() -> Any:
    """torch.distributed with a process group, or None."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone."""
    text = str(error).lower()
    return type(error).__name__ == "DistBackendError" or (
        isinstance(error, RuntimeError)
        and any(words in text for words in ("closed by peer", "connection reset", "broken pipe", "gloo", "socket"))
    )


# -- what a process is told -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """This process among others, as something tells it. `size` is None where nothing tells it."""

    rank: str
    size: int | None
    told_by: str

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size or 'several'} processes ({self.told_by})"


def refuse_ranks(row: str) -> None:
    """Raises BadInputError, with what `REFUSED` says of `row`, where this process is one of several."""
    told = ranks_here()
    if told is not None:
        raise refusal(row, ranks=told)


def ranks_here(environment: Mapping[str, str] = os.environ) -> Told | None:
    """What a process group or a launcher's variables say; None for a process that is alone.

    A rank above 0 has others beside it, even where nothing tells how many.
    """
    return _of_group() or _of_slurm(environment) or _of_launcher(environment)


def _of_group() -> Told | None:
    distributed = _distributed()
    if distributed is None:
        return None
    size = distributed.get_world_size()
    return Told(rank=str(distributed.get_rank()), size=size, told_by="torch.distributed") if size > 1 else None


def _of_slurm(environment: Mapping[str, str]) -> Told | None:
    """A task of an srun step. A batch script and an interactive shell have the variables of an allocation, which tell
    how many tasks there could be."""
    rank = _number(environment, "SLURM_PROCID")
    step = any(key in environment for key in ("SLURM_STEP_ID", "SLURM_STEPID"))
    if rank is None or not (step or rank > 0) or environment.get("SLURM_JOB_NAME") in _INTERACTIVE:
        return None
    told = next((key for key in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if key in environment), "SLURM_PROCID")
    return _several(rank, _number(environment, told) if told != "SLURM_PROCID" else None, told_by=f"srun: {told}")


def _of_launcher(environment: Mapping[str, str]) -> Told | None:
    for launcher, size, rank in LAUNCHERS:
        told_by = f"{launcher}: {size if size in environment else rank}"
        found = _several(_number(environment, rank), _number(environment, size), told_by=told_by)
        if found is not None:
            return found
    return None


def _several(rank: int | None, size: int | None, *, told_by: str) -> Told | None:
    if (size or 1) == 1 and not rank:
        return None
    return Told(rank="?" if rank is None else str(rank), size=size if size != 1 else None, told_by=told_by)


def _number(environment: Mapping[str, str], key: str) -> int | None:
    value = environment.get(key, "")
    return int(value) if value.isdecimal() else None


def unwrapped(module: Any) -> Any:
    """The network itself, whatever torch.compile, DistributedDataParallel and DataParallel put around it: names, blocks
    and roles are its own."""
    parallel: Any = sys.modules.get("torch.nn.parallel")
    wrappers = (parallel.DistributedDataParallel, parallel.DataParallel) if parallel is not None else ()
    while True:
        inner = module.module if isinstance(module, wrappers) else getattr(module, "_orig_mod", None)
        if not hasattr(inner, "named_parameters"):
            return module
        module = inner


def unwrapped_name(name: str) -> str:
    """A parameter's name without what torch.compile and wrappers such as DistributedDataParallel put into it."""
    return name.replace("_orig_mod.", "").removeprefix("module.")
