"""The Triton backend. A step is one launch per kernel kind and dtype, another for matched updates, and one upload.

On the host a step costs a look at where the gradients are and a few numbers per parameter group, whatever the number of
blocks. So it reads the addresses of parameters, states and matches once: whoever replaces one of them calls
`BlockRegistry.refresh`. Parameters that others have moved are noticed by comparing a few addresses in each step.

`ExchangedBackend` steps Muon's matrices whose rows are sharded over ranks, in batches of one shape. In a batch every
rank averages the gradients of its rows, receives all rows of its share of the matrices, orthogonalizes these, and sends
the rows back: two messages. States never leave their rank. Norms and the sums of matching are added up by a message
each, before weights are changed. See `kernels.triton.muon`. If a rank has no rows of a matrix, all ranks gather the
matrix and step it eagerly.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from itertools import chain, compress

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from baoc.core.catalogue import NEAREST, STORAGES
from baoc.kernels import FAMILIES, Engine, FusedTable, Kind, Shape, available, fits
from baoc.kernels.triton import muon_plan
from baoc.kernels.triton.kinds import NUM_THRESHOLDS, kernel_thresholds
from baoc.optim.backends.base import Backend, StepInputs
from baoc.optim.codecs import lanes_of
from baoc.optim.rules import RULES
from baoc.optim.shards import Shard, local_shard, shard_of
from baoc.optim.state import LiveBlock, Slot, State, unsharded_slot
from baoc.optim.weights import rounding_seed
from baoc.optim.wrappers import refuse_sparse
from baoc.types import OptimizerSpec, StateKind

_NOTHING = nullcontext()
_EAGER_BYTES_PER_ELEMENT = 48  # of a matrix, at most: temporaries of an eager step
_PHASES_AT_ONCE = 8  # whose lanes are prepared together, 4 KiB: one at a time would cost a step ten microseconds
_ADDRESSES_PER_STEP = 4  # parameters whose address is compared in each step, in turn


def kind_of(slot: Slot, *, weights: str) -> Kind:
    """The kernel that steps a parameter. Raises ValueError if there is none."""
    codecs = {state.decl.kind: state.codec.info.name for state in reversed(slot.states)}  # the first of each kind
    return Kind(
        rule=slot.rule.info.name,
        m=codecs.get(StateKind.M, "fp32"),
        v=codecs.get(StateKind.V, "fp32"),
        weights="native" if weights == "bf16" else weights,
    )


def has_kernel(spec: OptimizerSpec) -> bool:
    """True if a kernel steps the spec's large tensors, wherever there is Triton. Compiles nothing."""
    storage = STORAGES[spec.storage]
    codecs = {decl.kind: storage.codec(decl) for decl in reversed(RULES[spec.rule].info.states)}
    m, v = (codecs.get(kind, "fp32") for kind in (StateKind.M, StateKind.V))
    try:
        Kind(rule=spec.rule, m=m, v=v, weights="native" if spec.weights == NEAREST else spec.weights)
    except ValueError:
        return False
    return True


def is_bandwidth_bound(spec: OptimizerSpec) -> bool:
    """True if a kernel steps the spec, and its time is that of the bytes that it moves."""
    return has_kernel(spec) and not FAMILIES[spec.rule].takes_workspace


def temporary_bytes(spec: OptimizerSpec, *, params: Iterable[Tensor]) -> int:
    """The most bytes that a fused step takes beside states, tables and buffers, if all of `params` run the spec."""
    if not FAMILIES[spec.rule].takes_workspace:
        return 0
    matrices = [param for param in params if param.ndim > 1 and param.numel()]
    return muon_plan.temporary_bytes(
        Shape(numel=param.numel(), rows=len(param), cols=param.numel() // len(param)) for param in matrices
    )


def exchanged_temporary_bytes(params: Iterable[Tensor]) -> int:
    """The most bytes that a step of sharded `params` takes beside states, if all of their matrices run Muon."""
    eager_bytes, kernel_shapes, num_ranks = 0, [], 1
    for param in params:
        shard = shard_of(param)
        if shard is None or param.ndim < 2 or not param.numel():
            continue
        num_ranks = shard.group.size
        if available(param.device) and fits(local_shard(param)) and _all_have_rows(shard):
            kernel_shapes.append(Shape(numel=param.numel(), rows=len(param), cols=param.numel() // len(param)))
        else:
            eager_bytes = max(eager_bytes, _EAGER_BYTES_PER_ELEMENT * param.numel())
    return max(eager_bytes, muon_plan.temporary_bytes(kernel_shapes, ranks=num_ranks))


def _all_have_rows(shard: Shard) -> bool:
    size, rows = shard.group.size, len(shard.param)
    return (size - 1) * -(-rows // size) < rows


class FusedBackend(Backend):
    """Parameters on one NVIDIA GPU (or on the CPU if Triton interprets), which one engine steps. Non-finite elements
    are left out by the kernels and counted on the device; `new_nonfinite` reads the counts as they arrive."""

    name = "fused"
    excludes_nonfinite = True

    def __init__(
        self, blocks: Sequence[LiveBlock], *, state: Mapping[Tensor, State], device: torch.device | None = None
    ):
        """`device`: steps the parameters there, and each block has one. None: all, which are on one device."""
        super().__init__(blocks, state=state)
        self._sums = _SumsOverRanks(self.blocks)
        self._device = device
        self._engine: Engine | None = None
        self._params: list[Tensor] = []  # in the order of the engine's tables, as all lists are
        self._mark_of: TensorWeakRef | None = None  # one of the gradients whose non-finite elements were marked
        self._next_compared = 0  # index of the next parameter whose address is compared
        self._stepped_cache: tuple[int, list[Tensor]] = (-1, [])  # `gradients.num_changes`, and what it stepped then

    @classmethod
    def for_blocks(cls, blocks: Sequence[LiveBlock], *, state: Mapping[Tensor, State]) -> list[Backend]:
        by_device: dict[torch.device, dict[int, LiveBlock]] = {}
        for live in blocks:
            for slot in _stepped_slots(live):
                by_device.setdefault(slot.param.device, {})[id(live)] = live
        if len(by_device) < 2:
            return super().for_blocks(blocks, state=state)
        return [cls([*own.values()], state=state, device=device) for device, own in by_device.items()]

    @staticmethod
    def refusal(block: LiveBlock) -> str:
        """Why there is no kernel for the block; empty if there is. The same on all ranks that share it."""
        slots = _stepped_slots(block)
        params = [slot.param for slot in slots]
        if not all(available(param.device) for param in params):
            return "Triton steps parameters on NVIDIA GPUs only"
        try:
            for slot in slots:
                all_rows = slot if slot.shard is None else unsharded_slot(slot, spec=block.spec)
                kind_of(all_rows, weights=block.spec.weights)
        except ValueError as error:
            return str(error)
        unfit = [slot.name for slot in slots if not fits(slot.param)]
        if unfit:
            return f"{', '.join(unfit)}: not contiguous float32 or bfloat16"
        if block.matched and len({param.device for param in params}) > 1:
            return "its parameters are on several devices, and its update RMS is matched"
        return ""

    @property
    def engine(self) -> Engine | None:
        """Made when it is first needed. None if there is nothing to step, as on a rank without rows."""
        return self._engine or self._make_engine()

    def _make_engine(self) -> Engine | None:
        by_table: dict[tuple[Kind, torch.dtype], list[tuple[LiveBlock, Slot]]] = {}
        for block in self.blocks:
            for slot in block.slots:
                if slot.param.numel() and self._device in (None, slot.param.device):
                    key = kind_of(slot, weights=block.spec.weights), slot.param.dtype
                    by_table.setdefault(key, []).append((block, slot))
        if not by_table:
            return None
        tables = [_table(kind, members=members, state=self.state) for (kind, _), members in by_table.items()]
        engine = self._engine = Engine(tables, graphs=self.graphs)
        for table, members in zip(tables, by_table.values(), strict=True):
            for index, (_, slot) in enumerate(members):
                if slot.counts_steps:  # its count is a view of the engine's
                    self.state[slot.param]["step"] = table.steps[index]
        members = list(chain.from_iterable(by_table.values()))
        self._names, self._params = [slot.name for _, slot in members], [slot.param for _, slot in members]
        self._addresses = [row[0] for table in tables for row in table.addresses]
        self._last_counts = engine.num_nonfinite_host.tobytes()  # of non-finite elements, at the last look
        self._index = engine.device.index if engine.device.type == "cuda" else None
        matched = {id(block.match): block for block, _ in members if block.match is not None}
        self._unmeasured = [
            (block, [table for table in tables if any(match is block.match for match in table.matches)])
            for block in matched.values()
            if block.rms_unmeasured
        ]
        self._sums.bind(engine, slots=[slot for _, slot in members])
        return engine

    def prepare(self) -> None:
        """Makes the engine, if there is none yet."""
        _ = self.engine

    def _on_device(self) -> AbstractContextManager[object]:
        """Makes the engine's device the current one, which costs nothing if it is already."""
        if self._index is None or torch.cuda.current_device() == self._index:
            return _NOTHING
        return torch.cuda.device(self._index)

    def __call__(self, inputs: StepInputs) -> None:
        engine, unmeasured = self.engine, self._sums.unmeasured() if inputs.matching else ()
        if engine is not None:
            with self._on_device():
                # All ranks make the same all-reduces, so all measure first if a block of any rank is unmeasured.
                ranks_measure = bool(unmeasured) and engine.all_reduce_sums is not None
                self._step(engine, inputs, ranks_measure=ranks_measure)
        if inputs.matching:
            self._sums.join_without_rows(times=1 + bool(unmeasured))
        for block in unmeasured:
            block.rms_unmeasured = False

    def _step(self, engine: Engine, inputs: StepInputs, *, ranks_measure: bool) -> None:
        try:
            engine.stage(inputs.options, thresholds=kernel_lanes(inputs.phase), phase=inputs.phase)
        except (RuntimeError, NotImplementedError):
            refuse_sparse(zip(self._names, self._params, strict=True))
            raise
        measure = self._first_steps() if self._unmeasured and inputs.matching else []
        engine.run(
            matched=inputs.matching,
            marked=self._mark_of is not None and self.marked,
            measure=measure,
            other_ranks_measure=ranks_measure,
        )
        self._mark_of = None
        # Kernels write where autograd does not see it: a backward that still needs the old weights has to fail.
        torch.autograd.graph.increment_version(self._stepped(engine))

    def _stepped(self, engine: Engine) -> list[Tensor]:
        """Matrices that have a gradient; or if there are none, all parameters that have one. Each costs the host 50 ns
        in every step, and an autograd graph that keeps biases and scales keeps matrices too."""
        gradients = engine.gradients
        if self._stepped_cache[0] != gradients.num_changes:
            stepped = list(compress(gradients.params, gradients.active))
            matrices = [param for param in stepped if param.ndim > 1]
            self._stepped_cache = (gradients.num_changes, matrices or stepped)
        return self._stepped_cache[1]

    def _first_steps(self) -> list[FusedTable]:
        """Tables with blocks that have their first gradients now."""
        now, later = [], []
        for block, tables in self._unmeasured:
            has_gradient = any(slot.param.grad is not None for slot in block.slots if slot.param.numel())
            (now if has_gradient else later).append((block, tables))
        for block, _ in now:
            block.rms_unmeasured = False
        self._unmeasured = later
        return list({id(table): table for _, tables in now for table in tables}.values())

    @property
    def moved(self) -> bool:
        """Compares the address of the first parameter, which moves when a model does, and of some others in turn."""
        if self._engine is None:
            return False
        params, addresses = self._params, self._addresses
        begin = self._next_compared
        end = min(begin + _ADDRESSES_PER_STEP, len(params))
        self._next_compared = end if end < len(params) else 0
        if params[0].data_ptr() != addresses[0]:
            return True
        return [param.data_ptr() for param in params[begin:end]] != addresses[begin:end]

    def mark(self) -> None:
        if (engine := self.engine) is None:
            return
        try:
            with self._on_device():
                engine.mark(first=not self.marked)
        except (RuntimeError, NotImplementedError):
            refuse_sparse(zip(self._names, self._params, strict=True))
            raise
        grad = next((param.grad for param in self._params if param.grad is not None), None)
        self._mark_of = None if grad is None else TensorWeakRef(grad)

    def forget_marks(self) -> None:
        self._mark_of = None

    @property
    def marked(self) -> bool:
        """True if the first gradient is the tensor that was marked, or if there is nothing to mark."""
        if self._mark_of is None:
            return self.engine is None
        grad = next((param.grad for param in self._params if param.grad is not None), None)
        return grad is not None and self._mark_of() is grad

    def new_nonfinite(self, *, wait: bool) -> dict[str, int]:
        if (engine := self._engine) is None:
            return {}
        if wait:
            engine.read_num_nonfinite()
        now = engine.num_nonfinite_host.tobytes()
        if now == self._last_counts:
            return {}
        before, self._last_counts = memoryview(self._last_counts).cast("q"), now
        counts = memoryview(now).cast("q")
        new = [counts[place] - before[place] for place in engine.places]
        return {name: count for name, count in zip(self._names, new, strict=True) if count}


class ExchangedBackend(FusedBackend):
    """Muon of sharded matrices. Nothing is captured in CUDA graphs, as ranks send messages between kernels."""

    name = "exchanged"
    graphs = False

    @staticmethod
    def refusal(block: LiveBlock) -> str:
        """Why no kernel steps the block; empty if one does. The same on all ranks."""
        if not all(slot.gathers_rows for slot in block.slots):
            return "it steps matrices of which ranks hold some rows"
        if not all(slot.shard is not None and _all_have_rows(slot.shard) for slot in block.slots):
            return "a rank has no rows of one of its matrices"
        return FusedBackend.refusal(block)


class _SumsOverRanks:
    """All-reduces what matching needs of sharded tensors: sums of squares, and numbers of excluded elements. Each rank
    has an index for every tensor, also for those of which it has no rows."""

    def __init__(self, blocks: Sequence[LiveBlock]):
        matched = [block for block in blocks if block.match is not None]
        self._blocks = [block for block in matched if any(slot.shard is not None for slot in block.slots)]
        slots = [slot for block in self._blocks for slot in block.slots if slot.shard is not None]
        self._index_of = {id(slot): index for index, slot in enumerate(slots)}
        self._shard = slots[0].shard if slots and slots[0].shard is not None and slots[0].shard.group.size > 1 else None
        self._device = slots[0].param.device if slots else None
        self._bound = False

    def unmeasured(self) -> list[LiveBlock]:
        """Blocks whose own RMS is measured in this step."""
        blocks = [block for block in self._blocks if block.rms_unmeasured] if self._shard is not None else []
        return [block for block in blocks if any(slot.param.grad is not None for slot in block.slots)]

    def bind(self, engine: Engine, *, slots: Sequence[Slot]) -> None:
        """Lets the engine that steps the tensors all-reduce their sums, by `engine.all_reduce_sums`."""
        own = [(place, slot) for place, slot in zip(engine.places, slots, strict=True) if id(slot) in self._index_of]
        if self._shard is None or not own:
            return
        self._bound = True
        engine_places, sum_places = [place for place, _ in own], [self._index_of[id(slot)] for _, slot in own]
        source, target = (
            torch.tensor(places, dtype=torch.int64, device="cpu").to(engine.device)
            for places in (engine_places, sum_places)
        )
        numels = torch.tensor([slot.group_param.numel() for _, slot in own], dtype=torch.int64, device="cpu")
        engine.unsharded_numels = engine.numels.clone()
        engine.unsharded_numels[source] = numels.to(engine.device)
        sums = torch.zeros(2, len(self._index_of), dtype=torch.float64, device=engine.device)
        group = self._shard.group

        def all_reduce_sums() -> None:
            sums.zero_()
            sums[0, target] = engine.sums[source].to(torch.float64)
            sums[1, target] = engine.num_skipped[source].to(torch.float64)
            group.all_reduce_(sums)
            engine.sums[source] = sums[0, target].to(torch.float32)
            engine.num_skipped[source] = sums[1, target].to(torch.int32)

        engine.all_reduce_sums = all_reduce_sums

    def join_without_rows(self, *, times: int) -> None:
        """Takes part in the all-reduces of the other ranks, if this rank has no rows of any of the tensors."""
        if self._shard is None or self._bound:
            return
        for _ in range(times):
            sums = torch.zeros(2, len(self._index_of), dtype=torch.float64, device=self._device)
            self._shard.group.all_reduce_(sums)


def _stepped_slots(block: LiveBlock) -> list[Slot]:
    """Those of which some rank has elements."""
    return [slot for slot in block.slots if slot.param.numel() or slot.shard is not None]


def _table(kind: Kind, *, members: Sequence[tuple[LiveBlock, Slot]], state: Mapping[Tensor, State]) -> FusedTable:
    """The kernels' table of the tensors of one kind and dtype."""
    slots = [slot for _, slot in members]
    shapes = []
    for slot in slots:
        rows, cols = slot.matrix or (0, 0)
        shapes.append(Shape(numel=slot.param.numel(), rows=rows, cols=cols, transposed=slot.info.transposed))
    shard, unsharded_shapes = slots[0].shard, None
    if shard is not None and kind.family.takes_workspace and shard.group.size > 1:
        unsharded_shapes = []
        for slot in slots:
            rows, cols = replace(slot.info, shape=tuple(slot.group_param.shape)).matrix_shape or (0, 0)
            unsharded_shapes.append(
                Shape(numel=slot.group_param.numel(), rows=rows, cols=cols, transposed=slot.info.transposed)
            )
    return FusedTable(
        [slot.param for slot in slots],
        kind=kind,
        states=[state[slot.param] for slot in slots],
        groups=[slot.options_index for slot in slots],
        matches=[block.match for block, _ in members],
        shapes=shapes,
        seeds=[rounding_seed(slot.name, first=slot.offset) if kind.weights == "bf16_sr" else 0 for slot in slots],
        shards=shard.group if shard is not None and unsharded_shapes is not None else None,
        unsharded_shapes=unsharded_shapes,
    )


@lru_cache(maxsize=4)  # for four optimizers that are at different steps
def _many_kernel_lanes(first: int) -> list[memoryview]:
    flat = kernel_thresholds(lanes_of(first, _PHASES_AT_ONCE)).flatten().numpy().data
    return [flat[begin : begin + NUM_THRESHOLDS] for begin in range(0, len(flat), NUM_THRESHOLDS)]


def kernel_lanes(phase: int) -> memoryview:
    """The lanes of a step's phase as kernels take them, see `baoc.kernels.triton.kinds.kernel_thresholds`."""
    index = phase % _PHASES_AT_ONCE
    return _many_kernel_lanes(phase - index)[index]
