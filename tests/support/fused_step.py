"""One fused step of a single table, for tests and benchmarks of kernels; an optimizer has an engine for all its tables.

`prepare` is the host's part (addresses, settings, one small copy), `launch` the device's, which takes all it needs from
buffers that never move: it can be captured in a CUDA graph and replayed after each `prepare`.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from baoc.kernels import Call, FusedTable
from baoc.kernels.triton import engine
from baoc.kernels.triton.engine import Engine
from baoc.kernels.triton.kinds import Options, kernel_thresholds

Mode = Literal["step", "measure", "repair"]


def engine_of(table: FusedTable) -> Engine:
    """An engine of this table alone, made when it is first asked for and kept with the table."""
    held: dict[str, Any] = vars(table)
    if "engine" not in held:
        held["engine"] = Engine([table])
    return held["engine"]


def fused_step(
    table: FusedTable,
    *,
    options: Sequence[Options],
    thresholds: Iterable[float] | None = None,
    phase: int = 0,
    mode: Mode = "step",
    **call: bool,
) -> Tensor | None:
    """Steps every tensor of the table that has a gradient.

    `thresholds`: the codecs' lanes of this step's `phase`, fp32 [32] on the CPU. `call` is what `kinds.Call` says. With
    `track`, returns the sums of squares of each tensor's own update (fp32 [tensors], deterministic).
    """
    steps = engine_of(table).settings.steps.clone()
    prepare(table, options=options, thresholds=thresholds, phase=phase)
    if mode != "step":
        engine_of(table).settings.steps.copy_(steps)
    return launch(table, mode=mode, **call)


def prepare(
    table: FusedTable,
    *,
    options: Sequence[Options],
    thresholds: Iterable[float] | None = None,
    phase: int = 0,
) -> None:
    """Brings addresses and settings up to date, and counts the step."""
    lanes = None if thresholds is None else kernel_thresholds(torch.tensor([list(thresholds)]))[0].numpy().data
    engine_of(table).stage(options, thresholds=lanes, phase=phase)
    engine_of(table).send()


def launch(table: FusedTable, *, mode: Mode = "step", track: bool = False, **call: bool) -> Tensor | None:
    """Only kernels."""
    engine.launch(table, Call(mode=mode, track=track, **call))
    if not track:
        return None
    alone = engine_of(table)
    alone.sum_squares()
    return alone.sums[: len(table.params)]
