"""The Measurer of a plain loop: a callable of the caller's that runs one forward and backward."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from baoc.errors import BadInputError
from baoc.profiling import probe_footprint
from baoc.profiling.footprint import preserved_state
from baoc.profiling.latency import seconds_per_run
from baoc.types import Footprint, OptimizerSpec

REST_SHARE = 0.2  # of the seconds that a latency table may take, for timing forward and backward


def shapes_of(batch: Any, *, other: Callable[[Any], Any] = lambda value: type(value).__name__) -> Any:
    """Shapes and types of a batch's tensors, as plain values. `other`: what stands for anything else."""
    if isinstance(batch, Tensor):
        return [[int(size) for size in batch.shape], str(batch.dtype)]
    if isinstance(batch, Mapping):
        return {str(key): shapes_of(value, other=other) for key, value in batch.items()}
    return [shapes_of(value, other=other) for value in batch] if isinstance(batch, list | tuple) else other(batch)


def inputs_of(given: Any) -> Any:
    """What a step runs on, numbers and texts by value; None if there is more than these, tensors and containers."""

    def by_value(value: Any) -> Any:
        if value is None or isinstance(value, int | float | str):
            return value
        raise TypeError(f"a {type(value).__name__} is not known")

    try:
        return shapes_of(given, other=by_value)
    except Exception:  # of a container that cannot be walked, too: whoever looks must not end the caller's loop
        return None


class CallerProbe:
    """Measures by the caller's `run`, which returns a loss or runs backward itself.

    `source`: the module that is trained, or its parameters. `averaged`: DistributedDataParallel averages gradients, so
    that its buckets keep them all the time. `looks`: note the module's `inputs`.
    """

    accumulation = 1
    upkeep_bytes = 4  # that the check for non-finite gradients reads
    inputs: Any = None  # of the module, from the second run on, unless something is compiled: a hook would do it anew

    def __init__(
        self,
        run: Callable[[], object],
        *,
        source: nn.Module | Sequence[Tensor],
        averaged: bool = False,
        looks: bool = False,
    ):
        if not callable(run):
            raise BadInputError(f"probe is a {type(run).__name__}: give a function that runs one forward and backward")
        self._run, self._source, self._averaged, self._looks = run, source, averaged, looks
        self._ran = False
        self._module = source if isinstance(source, nn.Module) else None
        self._all = list(source.parameters()) if isinstance(source, nn.Module) else list(source)
        self._params = [param for param in self._all if param.requires_grad]

    def footprint(self, *, context_bytes: int, released: Sequence[Sequence[Tensor]] = ()) -> Footprint:
        """Bytes of the forward and backward that the caller runs."""
        return probe_footprint(
            self._source,
            run_micro_batch=self._once,
            context_bytes=context_bytes,
            released_blocks=released,
            accumulation=2 if self._averaged else 1,
        )

    def rest_seconds(
        self, specs: Sequence[OptimizerSpec], *, max_s: float, released: Sequence[Sequence[Tensor]]
    ) -> float:
        """Seconds of forward and backward, without the caller's clipping. Gradients are None afterwards."""
        with preserved_state(self._module, self._all):
            return seconds_per_run(self._step, device=self._params[0].device, max_s=REST_SHARE * max_s)

    def _once(self) -> object:
        """Runs `run`; returns the loss if its backward has not run yet, else None."""
        ran_backward: list[bool] = []
        inputs: list[Any] = []
        note_backward = lambda _: ran_backward.append(True)  # noqa: E731
        handles: list[Any] = [p.register_post_accumulate_grad_hook(note_backward) for p in self._params]
        if self._looks and self._module is not None and self._ran and not _has_compiled():
            look = lambda _, args, named: inputs.append(inputs_of([args, named]))  # noqa: E731
            handles.append(self._module.register_forward_pre_hook(look, with_kwargs=True))
        try:
            loss = self._run()
        finally:
            for handle in handles:
                handle.remove()
        self._ran, self.inputs = True, None if None in inputs else inputs or self.inputs
        return None if ran_backward else loss

    def _step(self) -> None:
        loss = self._once()
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.backward()
        for param in self._params:
            param.grad = None


def _has_compiled() -> bool:
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"]["total"])
