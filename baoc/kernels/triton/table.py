"""`FusedTable`: the tensors of one kind on one device, which one kernel launch steps together.

A table holds what stays the same between steps. What changes (gradient addresses, settings) lies in the buffers of the
engine that holds the table, see `baoc.kernels.triton.engine`.
"""

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baoc.kernels.triton.kinds import CORRECTION, MATCH, PARAM, PHASED, WIDTH, Kind, LaunchConfig, Shape

_DTYPES = (torch.float32, torch.bfloat16)
_MOST_LAUNCHES = 64  # keys: gradients come in few types, workspaces lie at few places
_recording = threading.local()  # `launches`: the list that is being recorded, if any


def fits(param: Tensor) -> bool:
    """True if a kernel can step this parameter: contiguous fp32 or bf16. Others take the eager path."""
    return param.dtype in _DTYPES and param.is_contiguous() and not param.is_sparse


class KeptLaunches:
    """Launches that can be made again as they are, by key."""

    def __init__(self) -> None:
        self._by_key: dict[Hashable, tuple[object, list[Callable[[], None]]]] = {}

    def run(self, key: Hashable, launch: Callable[[], None], *, of: object = None) -> None:
        """Calls `launch`, or makes the launches again that `start` made in its last call with this `key` and `of`.

        They have to be all that `launch` does, and what they read may not move while `key` and `of` stay the same.
        """
        kept_of, kept = self._by_key.get(key, (None, None))
        if kept is not None and kept_of is of:
            for each in kept:
                each()
            return
        recorded: list[Callable[[], None] | None] = []
        before, _recording.launches = getattr(_recording, "launches", None), recorded
        try:
            launch()
        finally:
            _recording.launches = before
        launches = [each for each in recorded if each is not None]
        if len(launches) == len(recorded):  # the interpreter compiles nothing
            if len(self._by_key) >= _MOST_LAUNCHES:
                self._by_key.clear()
            self._by_key[key] = of, launches


class FusedTable:
    """All tensors of one kind on one device, in order.

    The table takes addresses when it is made and keeps the tensors alive, so that a step never writes to freed memory.
    Whoever replaces a state tensor or moves a parameter's data has to make a new table.

    Args:
        states: the state dict of each parameter, with the keys of the kind; stepped in place. "step" is where the count
            of steps starts.
        groups: which of a step's settings each tensor takes; all 0 by default.
        matches: fp32 [2] (target, RMS of the last update) of each tensor's block. Tensors of a block share it and
            follow each other.
        shapes: needed by rules that see matrices.
        seeds: of stochastic rounding, for weights "bf16_sr".
        shards: the ranks that hold rows of the matrices, if the rule needs complete matrices: a
            `baoc.optim.shards.ShardGroup`, which kernels may not import.
        unsharded_shapes: the shapes of these complete matrices.
    """

    # Slices of the engine's buffers, on the device; `Engine._bind` sets them. Per tensor unless said otherwise.
    ptrs: Tensor  # int64 [tensors, WIDTH]: addresses, in the columns of `kinds`
    numels: Tensor  # int64
    shape_tensor: Tensor  # int64 [tensors, 4]: numel, rows, cols, transposed
    grad_ptrs: Tensor  # int64, 0 without a gradient
    settings: Tensor  # fp32 [tensors, WIDTH]
    thresholds: Tensor  # fp32 [132], for all tensors: `kinds.kernel_thresholds`, then int32 bits of the phase
    repair: Tensor  # fp32
    num_skipped: Tensor  # int32
    num_nonfinite: Tensor  # int64
    partial: Tensor  # fp32 [programs]
    steps: Tensor  # fp32, on the CPU
    workspace: Tensor | None = None  # uint8, of one step and shared by tables; only of families that take one
    max_workspace_bytes: int | None = None  # limit on it after an allocation failed

    def __init__(
        self,
        params: Sequence[Tensor],
        *,
        kind: Kind,
        states: Sequence[Mapping[str, Tensor]],
        groups: Sequence[int] | None = None,
        matches: Sequence[Tensor | None] | None = None,
        shapes: Sequence[Shape] | None = None,
        seeds: Sequence[int] | None = None,
        config: LaunchConfig | None = None,
        shards: Any = None,
        unsharded_shapes: Sequence[Shape] | None = None,
    ):
        num = len(params)
        self.kind, self.params = kind, list(params)
        self.device, self.dtype = self.params[0].device, self.params[0].dtype
        self.config = config or kind.family.launch_config(kind, self.dtype is torch.float32)
        self.groups = list(groups) if groups is not None else [0] * num
        self.matches = list(matches) if matches is not None else [None] * num
        self.shapes = list(shapes) if shapes is not None else [Shape(numel=p.numel()) for p in self.params]
        self.shards = shards
        self.unsharded_shapes = list(unsharded_shapes) if unsharded_shapes is not None else self.shapes
        self.first_steps = [float(state["step"]) if "step" in state else 0.0 for state in states]
        self.aligned = True  # all tensors, to vectors of `config.vector` elements
        self.grads_aligned = True
        self.grad_dtype = self.dtype
        self.columns = {**kind.family.columns, "correction": CORRECTION}
        self.addresses = [self._row(i, state, seed=seeds[i] if seeds else 0) for i, state in enumerate(states)]
        self._alive = [*(p.detach() for p in self.params), *self.matches]
        self._alive += [tensor for key in self.columns for state in states if (tensor := state.get(key)) is not None]
        self._lay_out()
        self._buffers: dict[str, Tensor] = {}
        self.plans: dict[int | None, Any] = {}  # of `means_plan` or `muon_plan`, by `max_workspace_bytes`
        self.launches = KeptLaunches()

    def _row(self, index: int, state: Mapping[str, Tensor], *, seed: int) -> list[int]:
        """Addresses of a tensor, its states, correction (or seed) and match. Raises ValueError if they do not fit."""
        param, match = self.params[index], self.matches[index]
        wanted = self.dtype if self.kind.weights == "native" else torch.bfloat16
        if not fits(param) or param.dtype is not wanted or param.device != self.device:
            raise ValueError(
                f"tensor {index} is {param.dtype} on {param.device} with strides {param.stride()}: a table takes "
                f"contiguous {wanted} tensors on {self.device}; step others with the eager backend"
            )
        row = [0] * WIDTH
        row[PARAM], row[CORRECTION] = param.data_ptr(), seed
        row[MATCH] = 0 if match is None else match.data_ptr()
        self.aligned &= self.is_aligned(param.data_ptr(), param.element_size())
        for key, nbytes in self.kind.sizes(self.shapes[index]).items():
            tensor = state[key]
            if tensor.numel() * tensor.element_size() != nbytes or not tensor.is_contiguous():
                raise ValueError(
                    f"state {key} of tensor {index} is {tensor.dtype} of shape {tuple(tensor.shape)} and strides "
                    f"{tensor.stride()}: {self.kind} needs {nbytes} contiguous bytes"
                )
            row[self.columns[key]] = tensor.data_ptr()
            self.aligned &= self.is_aligned(tensor.data_ptr(), tensor.element_size())
        return row

    @property
    def vector(self) -> int:
        """Elements that a thread loads at once: those of the launch config, or 1 where a tensor is not aligned."""
        return self.config.vector if self.aligned and self.grads_aligned else 1

    def is_aligned(self, address: int, size: int) -> bool:
        """True if a thread may load its whole vector of elements of `size` bytes at once."""
        return address % (self.config.vector * size) == 0

    def _lay_out(self) -> None:
        """Gives each tensor its programs: `program_tensor` (tensor of each), `first_program` (of a tensor)."""
        programs = [self.kind.family.programs(shape, self.config) for shape in self.shapes]
        counts = torch.tensor(programs, dtype=torch.int64, device="cpu")
        starts = torch.zeros(len(programs) + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(counts, 0, out=starts[1:])
        owner = torch.repeat_interleave(torch.arange(len(programs), dtype=torch.int32, device="cpu"), counts)
        self.num_programs = int(starts[-1])
        self.program_starts: list[int] = starts.tolist()
        self.program_tensor = owner.to(self.device)
        self.first_program = starts.to(torch.int32).to(self.device)

    def buffer(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """A device buffer of the family's kernels, made at the first request and counted in `nbytes`."""
        if name not in self._buffers:
            self._buffers[name] = make()
        return self._buffers[name]

    @property
    def needs_thresholds(self) -> bool:
        """True if a step rounds by thresholds: states of some codecs, corrections, stochastically rounded weights."""
        kind, traits = self.kind, self.kind.traits
        rounded = (traits.has_m and kind.m in PHASED) or (traits.has_v and kind.v in (*PHASED, "bf16"))
        return rounded or kind.weights in ("split8", "bf16_sr")

    @property
    def nbytes(self) -> int:
        """Device bytes of the table itself, beyond the optimizer's state and the engine's buffers."""
        own = (self.program_tensor, self.first_program, *self._buffers.values())
        return sum(t.numel() * t.element_size() for t in own)


def start(kernel: Any, grid: Sequence[int], *arguments: Any, **options: Any) -> None:
    """Launches a kernel. Inside `KeptLaunches.run` it is kept, to be launched again.

    Triton's own launch looks at each argument to find what it compiled for such arguments, and asks the driver about
    each address. Between the kernels of a backward pass, a kept one takes the host a tenth of that.
    """
    compiled = kernel[grid](*arguments, **options)
    recorded = getattr(_recording, "launches", None)
    if recorded is not None:
        recorded.append(None if compiled is None else _prepared(kernel, compiled, grid, arguments, options))


def _prepared(
    kernel: Any, compiled: Any, grid: Sequence[int], arguments: Sequence[Any], options: Mapping[str, Any]
) -> Callable[[], None]:
    """A function that launches `compiled` again on the same addresses."""
    by_name = [options[name] for name in kernel.arg_names[len(arguments) :]]
    in_order = [value.data_ptr() if isinstance(value, Tensor) else value for value in (*arguments, *by_name)]
    return partial(compiled[(*grid, 1, 1)[:3]], *in_order)
