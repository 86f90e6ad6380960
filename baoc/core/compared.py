"""Which settings make two runs different: for a frontier, for a race that goes on, and for a run that resumes.

One row per setting of a run, so that a new one is asked the three questions at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Who compares a setting, and why.

    Attributes:
        why: What the answers rest on.
        frontier: Whether runs that differ in it are points of their own, and not seeds of one point.
        race: Whether a race goes on only with the value that it began with.
        not_race: Keys of the setting that a race may change meanwhile.
        resume: Keys that a resumed run names if they differ from the checkpoint's; () for all, None for none.
        not_resume: Keys that it does not name.
    """

    why: str
    frontier: bool = True
    race: bool = True
    not_race: tuple[str, ...] = ()
    resume: tuple[str, ...] | None = None
    not_resume: tuple[str, ...] = ()


_KEEPS_PLAN = "decides the plan, which a resumed run keeps or tells of itself"
_WRITES = "what is written, not what is trained"

COMPARED: Mapping[str, Compared] = {
    "name": Compared(why="names a folder", frontier=False, race=False),
    "seed": Compared(why="a frontier averages over seeds; a race draws its seeds from it", frontier=False),
    "mode": Compared(why="what is done with a configuration", frontier=False, race=False),
    "resume": Compared(why="where a run begins, not what it trains", frontier=False, race=False),
    "logger": Compared(why=_WRITES, frontier=False, race=False),
    "checkpoint": Compared(why=_WRITES, frontier=False, race=False),
    "device": Compared(why="bytes and seconds are a device's; weights go on anywhere"),
    "objective": Compared(why=_KEEPS_PLAN),
    "batch_size": Compared(why="samples of a step", resume=()),
    "micro_batch": Compared(why="bytes and seconds; a step sees only the accumulation that comes of it"),
    "accumulation": Compared(why="micro-batches of a step on all devices together, whatever their number", resume=()),
    "task": Compared(why="the loss", resume=()),
    "model": Compared(
        why="the network; loading weights refuses another, and the decision tells of how it is run",
        resume=(),
        not_resume=("pretrained", "new_head", "size", "checkpointing", "compile"),
    ),
    "dataset": Compared(
        why="the samples; a folder may move, and workers only read ahead", resume=(), not_resume=("path", "workers")
    ),
    "budget": Compared(why=_KEEPS_PLAN),
    "blocks": Compared(why=_KEEPS_PLAN),
    "catalogue": Compared(why=_KEEPS_PLAN),
    "risk": Compared(why=_KEEPS_PLAN),
    "allocator": Compared(why=_KEEPS_PLAN),
    "recipe": Compared(why=_KEEPS_PLAN),
    "race": Compared(why="entrants and their runs", not_race=("workers", "per_gpu", "library")),
    "reallocation": Compared(why=_KEEPS_PLAN),
    "trainer": Compared(
        why="a resumed run trains longer as a rule, and validates and logs as it likes",
        resume=("precision", "gradient_clip_val", "gradient_clip_algorithm", "overfit_batches"),
    ),
    "optim": Compared(
        why="loading the optimizer tells of rate, betas, eps and weight decay, which stay the checkpoint's",
        resume=("warmup_fraction", "schedule", "final_lr_fraction", "matching", "nonfinite"),
    ),
    "faults": Compared(why="when a run gives up"),
}

# Values that mean the same: setting -> value -> the one that is compared.
SAME: Mapping[str, Mapping[object, object]] = {
    "trainer.precision": {
        **dict.fromkeys((None, 32, "32"), "32-true"),
        **dict.fromkeys((16, "16"), "16-mixed"),
        **dict.fromkeys((64, "64"), "64-true"),
        "bf16": "bf16-mixed",
    },
    "trainer.gradient_clip_val": {0: None},
    "trainer.gradient_clip_algorithm": {None: "norm"},
}
