"""The table of a fused step: where the tensors of one kind are, so that one launch steps them all.

A table is what never changes between steps; what does (gradient addresses, settings) belongs to the engine that holds
it, see `baoc.kernels.triton.engine`.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from baoc.kernels.triton.kinds import PHASED, Kind, LaunchConfig, Shape

WIDTH = 8  # columns of addresses and of settings
PARAM_AT, CORRECTION_AT, MATCH_AT = 0, 5, 6
_DTYPES = (torch.float32, torch.bfloat16)
T = TypeVar("T")


def fits(param: Tensor) -> bool:
    """True if a kernel can step this parameter: contiguous fp32 or bf16. Others take the eager path."""
    return param.dtype in _DTYPES and param.is_contiguous() and not param.is_sparse


class ShardGroup(Protocol):
    """The ranks that have parts of a table's tensors."""

    @property
    def size(self) -> int: ...

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Adds the tensor up over ranks, in place."""
        ...

    def all_to_all(self, parts: Tensor, *, into: Tensor) -> Tensor:
        """Part i of the first dimension goes to rank i; what came from rank i is part i of `into`."""
        ...


class FusedTable:
    """All tensors of one kind on one device, in order.

    `states[i]` is the state dict of `params[i]`, with the keys that the kind has and "step", from which the count goes
    on; it is stepped in place. `groups[i]` indexes the settings given to each step (all 0 if left out). `matches[i]` is
    the fp32[2] (target, own RMS) of the tensor's block, the same tensor for all of a block, which must follow each
    other. `shapes` are needed by rules that see matrices, `seeds` by weights that are rounded at random. Where a rule
    needs whole matrices, and each rank of `shards` has some rows of them, `unsharded_shapes` are their shapes.

    Addresses are taken once: whoever replaces a state tensor or moves a parameter's data drops the table. Until then it
    keeps both alive, so that a step never writes to memory that was given back.
    """

    # What the engine binds: slices of its buffers, on the device. Per tensor unless said otherwise.
    ptrs: Tensor  # int64 [tensors, 8]: addresses of param, states (Family.columns), correction or seed, match
    numels: Tensor  # int64
    shape_tensor: Tensor  # int64 [tensors, 4]: numel, rows, cols, transposed
    grad_ptrs: Tensor  # int64, 0 without a gradient
    settings: Tensor  # fp32 [tensors, 8]
    thresholds: (
        Tensor  # fp32 [132], for all: the codecs' lanes (`kinds.kernel_thresholds`), and int32 bits of the phase
    )
    repair: Tensor  # fp32
    num_skipped: Tensor  # int32
    num_nonfinite: Tensor  # int64
    partial: Tensor  # fp32 [programs]
    steps: Tensor  # fp32, on the CPU
    workspace: Tensor | None = (
        None  # uint8, shared with other tables, while a step runs of a family that takes workspace
    )
    max_workspace_bytes: int | None = (
        None  # bytes that it may have, where the device had no place for what it takes at best
    )

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
        shards: ShardGroup | None = None,
        unsharded_shapes: Sequence[Shape] | None = None,
    ):
        num = len(params)
        self.kind, self.params = kind, list(params)
        self.device, self.dtype = self.params[0].device, self.params[0].dtype
        self.config = config or kind.family.launch_config(kind, self.dtype is torch.float32)
        self.groups = list(groups) if groups is not None else [0] * num
        self.matches = list(matches) if matches is not None else [None] * num
        self.shapes = list(shapes) if shapes is not None else [Shape(numel=p.numel()) for p in self.params]
        self.shards, self.unsharded_shapes = (
            shards,
            list(unsharded_shapes) if unsharded_shapes is not None else self.shapes,
        )
        self.first_steps = [float(state["step"]) if "step" in state else 0.0 for state in states]
        self.aligned = True  # all tensors, to the vector that the cut asks for
        self.grads_aligned = True
        self.grad_dtype = self.dtype
        self.columns = {**kind.family.columns, "correction": CORRECTION_AT}
        self.addresses = [self._row(i, state, seed=seeds[i] if seeds else 0) for i, state in enumerate(states)]
        self._alive = [*(p.detach() for p in self.params), *self.matches]
        self._alive += [tensor for key in self.columns for state in states if (tensor := state.get(key)) is not None]
        self._lay_out()
        self._extra: dict[str, Tensor] = {}

    def _row(self, index: int, state: Mapping[str, Tensor], *, seed: int) -> list[int]:
        """Addresses of one tensor and of what belongs to it, once they are seen to be what the kind needs."""
        param, match = self.params[index], self.matches[index]
        wanted = self.dtype if self.kind.weights == "native" else torch.bfloat16
        if not fits(param) or param.dtype is not wanted or param.device != self.device:
            raise ValueError(
                f"tensor {index} is {param.dtype} on {param.device} with strides {param.stride()}: a table takes "
                f"contiguous {wanted} tensors on {self.device}; step others with the eager backend"
            )
        row = [0] * WIDTH
        row[PARAM_AT], row[CORRECTION_AT] = param.data_ptr(), seed
        row[MATCH_AT] = 0 if match is None else match.data_ptr()
        self.aligned &= self.is_aligned(param.data_ptr(), param.element_size())
        for key, nbytes in self.kind.sizes(self.shapes[index]).items():
            kept = state[key]
            if kept.numel() * kept.element_size() != nbytes or not kept.is_contiguous():
                raise ValueError(
                    f"state {key} of tensor {index} is {kept.dtype} of shape {tuple(kept.shape)} and strides "
                    f"{kept.stride()}: {self.kind} needs {nbytes} contiguous bytes"
                )
            row[self.columns[key]] = kept.data_ptr()
            self.aligned &= self.is_aligned(kept.data_ptr(), kept.element_size())
        return row

    @property
    def vector(self) -> int:
        """Elements that a lane reads at once: as the cut has it where all tensors and gradients are aligned to it."""
        return self.config.vector if self.aligned and self.grads_aligned else 1

    def _lay_out(self) -> None:
        """Which tensor each program steps, on the device."""
        programs = [self.kind.family.programs(shape, self.config) for shape in self.shapes]
        counts = torch.tensor(programs, dtype=torch.int64, device="cpu")
        first = torch.zeros(len(programs) + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(counts, 0, out=first[1:])
        owner = torch.repeat_interleave(torch.arange(len(programs), dtype=torch.int32, device="cpu"), counts)
        self.num_chunks = int(first[-1])
        self.firsts: list[int] = first.tolist()
        self.chunk_tensor = owner.to(self.device)
        self.first_chunk = first.to(torch.int32).to(self.device)

    def is_aligned(self, address: int, size: int) -> bool:
        """True if a thread may load its whole vector of elements of `size` bytes at once."""
        return address % (self.config.vector * size) == 0

    def extra(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """A buffer of the family's own, made when it is first asked for and kept."""
        if name not in self._extra:
            self._extra[name] = make()
        return self._extra[name]

    @property
    def needs_thresholds(self) -> bool:
        """True if something is rounded by the step's phase: coded states of some kinds, corrections, random weights."""
        kind, traits = self.kind, self.kind.traits
        rounded = (traits.has_m and kind.m in PHASED) or (traits.has_v and kind.v in (*PHASED, "bf16"))
        return rounded or kind.weights in ("split8", "bf16_sr")

    @property
    def nbytes(self) -> int:
        """Device bytes of the table's own, beyond the optimizer's state and the engine's buffers."""
        own = (self.chunk_tensor, self.first_chunk, *self._extra.values())
        return sum(t.numel() * t.element_size() for t in own)


def kept_by_table(make: Callable[[FusedTable], T]) -> Callable[[FusedTable], T]:
    """`make`, called at a table's first launch alone; what it made goes with the table."""
    made: weakref.WeakKeyDictionary[FusedTable, T] = weakref.WeakKeyDictionary()

    def of(table: FusedTable) -> T:
        found = made.get(table)
        if found is None:
            found = made[table] = make(table)
        return found

    return of
