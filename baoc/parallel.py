"""Whether this process is one of several, and what is refused where it is: the only place that knows of ranks.

Each row of `REFUSED` is one thing that is not done there yet, and goes when it is. torch is looked at where it is
loaded already: what has not loaded it has no process group.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baoc.errors import BadInputError

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

_BLOCKWISE = (
    "BlockwiseOptimizer with specs of your own, built before DistributedDataParallel, is the same in every process"
)
REFUSED = {
    "run": (
        "a run was started as {ranks}: each would train alone on all of the data. Start it once, without a launcher of "
        "ranks; several budgets or seeds run side by side with -m"
    ),
    "study": (
        "a study was started as {ranks}: each would work on it alone. Start it once per worker, without a launcher of "
        "ranks; each trial is one process tree"
    ),
    "strategy": (
        "BaocStrategy was built in {ranks}: it trains on one device for now, and each process would train alone on all "
        f'of the data. Start one process, or train with Trainer(strategy="ddp"), where {_BLOCKWISE}'
    ),
    "optimizer": (
        "BaocOptimizer was built in {ranks}: each would plan by its own memory, clock and gradients, so that plans and "
        f"weights differ. Train in one process; {_BLOCKWISE}"
    ),
    "decision": (
        "a plan that BAOC made is stepped in {ranks}: each would decide anew by its own clock and gradients, so that "
        f"plans and weights differ. Train in one process; {_BLOCKWISE}"
    ),
    "release": (
        "gradient release was asked for in {ranks}: it steps before gradients are averaged over them. Train in one "
        "process, or without release"
    ),
    "last_backward": (
        "optimizer.last_backward() was entered in {ranks}: it steps host-placed blocks before gradients are averaged "
        "over them. Train in one process, or leave it out"
    ),
    "dtensor": (
        "{name} is a DTensor (fully_shard, tensor parallelism): blocks are stepped whole for now. Leave its module "
        "unsharded, with DistributedDataParallel over several processes"
    ),
    "fsdp1": (
        "{name} is a flat part of FullyShardedDataParallel, which no block can be made of: leave its module unsharded, "
        "with DistributedDataParallel over several processes"
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
}  # fmt: skip


def refusal(row: str, **facts: object) -> BadInputError:
    """What `REFUSED` says of `row`, with its facts in place."""
    return BadInputError(REFUSED[row].format(**facts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among others. `size` is None where nothing tells it."""

    rank: str
    size: int | None
    told_by: str

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size or 'several'} processes ({self.told_by})"


def refuse_ranks(row: str) -> None:
    """Raises BadInputError, with what `REFUSED` says of `row`, where this process is one of several."""
    ranks = ranks_here()
    if ranks is not None:
        raise refusal(row, ranks=ranks)


def ranks_here(environment: Mapping[str, str] = os.environ) -> Ranks | None:
    """What a process group or a launcher's variables say; None for a process that is alone.

    A rank above 0 has others beside it, even where nothing tells how many.
    """
    return _of_group() or _of_slurm(environment) or _of_launcher(environment)


def _of_group() -> Ranks | None:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    size = distributed.get_world_size()
    return Ranks(rank=str(distributed.get_rank()), size=size, told_by="torch.distributed") if size > 1 else None


def _of_slurm(environment: Mapping[str, str]) -> Ranks | None:
    """A task of an srun step. A batch script and an interactive shell have the variables of an allocation, which tell
    how many tasks there could be."""
    rank = _number(environment, "SLURM_PROCID")
    step = any(key in environment for key in ("SLURM_STEP_ID", "SLURM_STEPID"))
    if rank is None or not (step or rank > 0) or environment.get("SLURM_JOB_NAME") in _INTERACTIVE:
        return None
    told = next((key for key in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if key in environment), "SLURM_PROCID")
    return _several(rank, _number(environment, told) if told != "SLURM_PROCID" else None, told_by=f"srun: {told}")


def _of_launcher(environment: Mapping[str, str]) -> Ranks | None:
    for launcher, size, rank in LAUNCHERS:
        told_by = f"{launcher}: {size if size in environment else rank}"
        found = _several(_number(environment, rank), _number(environment, size), told_by=told_by)
        if found is not None:
            return found
    return None


def _several(rank: int | None, size: int | None, *, told_by: str) -> Ranks | None:
    if (size or 1) == 1 and not rank:
        return None
    return Ranks(rank="?" if rank is None else str(rank), size=size if size != 1 else None, told_by=told_by)


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
