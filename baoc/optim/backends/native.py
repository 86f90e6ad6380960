"""The C++ backend for the CPU: one call per kind of state steps all tensors of a spec, on torch's number of threads.

Its arithmetic is the eager backend's, operation by operation. Weights and codes are the same bits, except where torch
does not round correctly (MKL's square root) or sums in another order: tests/kernels/test_native_*.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import log

import torch
from torch import Tensor

from baoc.core.catalogue import STORAGES
from baoc.errors import BadInputError
from baoc.kernels import fits
from baoc.kernels.cpp import CODECS as NATIVE_CODECS
from baoc.kernels.cpp import THRESHOLDS, NativeKind, NativeTable, Unavailable, library_or_error
from baoc.kernels.cpp import WEIGHTS as NATIVE_WEIGHTS
from baoc.optim.backends.base import Backend, Options, StepInputs
from baoc.optim.backends.eager import UpdateSize, matching_factor
from baoc.optim.codecs import lanes
from baoc.optim.rules import RULES
from baoc.optim.rules.sign import LION_DECAY
from baoc.optim.shards import ShardGroup
from baoc.optim.state import LiveBlock, Slot, State
from baoc.optim.weights import rounding_seed
from baoc.types import OptimizerSpec, RuleInfo, StateLayout

SIGNS = ("lion", "signum", "sign")  # their updates have an RMS of at most 1
_ELEMENTWISE = ("adamw", "rmsprop", *SIGNS)
_TRANSPOSED = {"adamw_shared_in": "adamw_shared_out", "adamw_shared_out": "adamw_shared_in"}  # rule -> on the transpose
_FOAM_ALPHA = 0.25  # as in baoc.optim.rules.foam
_CPU = torch.device("cpu")


class NativeBackend(Backend):
    """Blocks of contiguous fp32 and bf16 parameters on the CPU, where there is a C++17 compiler."""

    name = "native"

    def __init__(self, blocks: Sequence[LiveBlock], *, state: Mapping[Tensor, State]):
        super().__init__(blocks, state=state)
        self._units: list[_Unit] | None = None

    @staticmethod
    def available() -> bool:
        """True if the library is there or can be compiled."""
        return not isinstance(library_or_error(), Unavailable)

    @staticmethod
    def require() -> None:
        if isinstance(why := library_or_error(), Unavailable):
            raise BadInputError(
                f"the native optimizer backend cannot be used: {why}. Install a C++17 compiler (g++ or clang++) or "
                "name one in $CXX, or set the backend to auto or eager"
            ) from why

    @staticmethod
    def refusal(block: LiveBlock) -> str:
        """Why the native step does not take the block; empty if it does."""
        slots = [slot for slot in block.slots if slot.param.numel()]
        unfit = [slot.name for slot in slots if slot.param.device.type != "cpu" or not fits(slot.param)]
        if unfit:
            return f"{', '.join(unfit)}: not contiguous float32 or bfloat16 on the CPU"
        why = native_refusal(block.spec)
        if why:
            return why
        transposed = [slot.name for slot in slots if slot.info.transposed]
        if transposed and fold_of(block.rule.info) > 1:
            return f"{', '.join(transposed)}: stored (fan_in, fan_out), which the native step does not fold"
        return str(why) if isinstance(why := library_or_error(), Unavailable) else ""

    @property
    def units(self) -> list["_Unit"]:
        if self._units is None:
            specs = dict.fromkeys(block.spec for block in self.blocks)
            by_spec = ([block for block in self.blocks if block.spec == spec] for spec in specs)
            self._units = [_Unit(blocks, state=self.state) for blocks in by_spec]
        return self._units

    def __call__(self, inputs: StepInputs) -> None:
        for unit in self.units:
            unit.step(inputs)

    @property
    def moved(self) -> bool:
        return any(table.native.moved for unit in self._units or () for table in unit.tables)


@dataclass(slots=True)
class _Table:
    """A native table, the blocks and slots that it steps, and per slot the numbers of the present step."""

    native: NativeTable
    members: list[tuple[LiveBlock, Slot]]
    active: list[bool] = field(default_factory=list)
    settings: list[tuple[float, ...]] = field(default_factory=list)
    divisors: list[float] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    norms: list[tuple[float, int]] = field(default_factory=list)  # of the rule's own update, and its elements


class _Unit:
    """The tables of one spec."""

    def __init__(self, blocks: Sequence[LiveBlock], *, state: Mapping[Tensor, State]):
        self.rule, self.state, self.blocks = blocks[0].rule.info, state, blocks
        members: dict[NativeKind, list[tuple[LiveBlock, Slot]]] = {}
        for block in blocks:
            for slot in block.slots:
                if slot.param.numel():
                    members.setdefault(kind_of(slot), []).append((block, slot))
        self.tables = [_Table(_native_table(kind, of_kind, state=state), of_kind) for kind, of_kind in members.items()]
        self.sharded = [(block, slot) for block in blocks for slot in block.slots if slot.shard is not None]
        self.shard_group = next((slot.shard.group for _, slot in self.sharded if slot.shard is not None), None)
        self.sums: dict[int, tuple[float, int]] = {}  # id of a sharded slot -> norm and elements of all rows' update

    def step(self, inputs: StepInputs) -> None:
        for table in self.tables:
            table.active = table.native.refresh(inputs.masks)
            table.factors = [1.0] * len(table.members)
            self._set_numbers(table, inputs.options)
        matched = inputs.matching and self.rule.matched
        if matched:
            self._match(inputs)
        for table in self.tables:
            self._count_steps(table)
        self._run_all(inputs, measure=matched)
        for table in self.tables:
            torch.autograd.graph.increment_version(
                [slot.param for (_, slot), active in zip(table.members, table.active, strict=True) if active]
            )
        if matched:
            for block, size in self._update_sizes().items():
                assert block.match is not None
                block.match[1] = size.rms

    def _set_numbers(self, table: _Table, options: Sequence[Options]) -> None:
        """Sets each slot's settings and divisor, from its options and the number of its coming step."""
        by_options_and_step: dict[tuple[int, int], tuple[tuple[float, ...], float]] = {}
        numbers = []
        for _, slot in table.members:
            step = int(self.state[slot.param]["step"].item()) + 1 if slot.counts_steps else 0
            key = (slot.options_index, step)
            if key not in by_options_and_step:
                by_options_and_step[key] = settings_of(self.rule, options[slot.options_index], step=step)
            numbers.append(by_options_and_step[key])
        table.settings = [settings for settings, _ in numbers]
        table.divisors = [divisor for _, divisor in numbers]

    def _count_steps(self, table: _Table) -> None:
        pairs = zip(table.members, table.active, strict=True)
        steps = [self.state[slot.param]["step"] for (_, slot), active in pairs if active and slot.counts_steps]
        if steps:
            torch._foreach_add_(steps, 1.0)  # pyright: ignore[reportPrivateImportUsage]

    def _run_all(self, inputs: StepInputs, *, measure: bool, store: bool = True) -> None:
        """Runs all tables. `measure`: sets the tables' norms, which are those of all rows of a tensor."""
        for table in self.tables:
            self._run(table, inputs, measure=measure, store=store)
        if measure and self.shard_group is not None:
            self._all_reduce_norms(self.shard_group)

    def _run(self, table: _Table, inputs: StepInputs, *, measure: bool, store: bool) -> None:
        pairs = zip(table.settings, table.factors, strict=True)
        settings = [(decay, size * factor, *others) for (decay, size, *others), factor in pairs]
        sums, counts = table.native.run(
            settings, thresholds=thresholds_of(inputs.phase), phase=inputs.phase, keep_update=measure, store=store
        )
        if measure:
            sizes = zip(sums, counts, table.divisors, strict=True)
            table.norms = [(total**0.5 / abs(divisor), count) for total, count, divisor in sizes]

    def _all_reduce_norms(self, group: ShardGroup) -> None:
        """Norms over ranks. Each rank adds two numbers for each sharded tensor, zeros if it has no rows of it."""
        places = {id(slot): 2 * index for index, (_, slot) in enumerate(self.sharded)}
        numbers = [0.0] * (2 * len(places))
        members = [(table, index, slot) for table in self.tables for index, (_, slot) in enumerate(table.members)]
        for table, index, slot in members:
            if slot.shard is not None and table.active[index]:
                norm, count = table.norms[index]
                numbers[places[id(slot)] : places[id(slot)] + 2] = [norm * norm, count]
        totals = group.all_reduce_(torch.tensor(numbers, dtype=torch.float64, device="cpu")).tolist()
        self.sums = {key: (totals[place] ** 0.5, int(totals[place + 1])) for key, place in places.items()}
        for table, index, slot in members:
            if slot.shard is not None:
                table.norms[index] = self.sums[id(slot)]

    # -- update RMS matching, as the eager backend does it --------------------------------------------------------

    def _match(self, inputs: StepInputs) -> None:
        """Sets the factor of every tensor. It depends on the update's norm, so the step is run without storing first,
        but for signs, unless the block nearly stood still before: their RMS is at most 1."""
        if self.rule.name in SIGNS and all(_sign_factor_is_known(block) for block in self.blocks):
            matches = {block: block.match.tolist() for block in self.blocks if block.match is not None}
            for table in self.tables:
                table.factors = [target / own for target, own in (matches[block] for block, _ in table.members)]
            return
        self._run_all(inputs, measure=True, store=False)
        for block, size in self._update_sizes().items():
            if block.rms_unmeasured:
                assert block.match is not None
                block.match[1] = size.rms
                block.rms_unmeasured = False
        for table in self.tables:
            members = zip(table.members, table.norms, table.active, strict=True)
            table.factors = [
                float(matching_factor(block.match, norm=norm, count=count)) if active and block.match is not None else 1
                for (block, _), (norm, count), active in members
            ]

    def _update_sizes(self) -> dict[LiveBlock, UpdateSize]:
        """Each block's update size, over its tensors with gradients."""
        sizes: dict[LiveBlock, UpdateSize] = defaultdict(UpdateSize)
        for table in self.tables:
            for (block, _), (norm, count), active in zip(table.members, table.norms, table.active, strict=True):
                if active:
                    sizes[block].add(norm, count=count)
        for block, slot in self.sharded:
            if not slot.param.numel() and slot.param.grad is not None and id(slot) in self.sums:
                norm, count = self.sums[id(slot)]
                sizes[block].add(norm, count=count)
        return sizes


def _sign_factor_is_known(block: LiveBlock) -> bool:
    """True if an update of signs cannot reach the bound of matching, so that its factor is target / own RMS."""
    if block.match is None:
        return True
    target, own = block.match.tolist()
    return not block.rms_unmeasured and own * max(1.0, target) >= target


def _native_table(
    kind: NativeKind, members: Sequence[tuple[LiveBlock, Slot]], *, state: Mapping[Tensor, State]
) -> NativeTable:
    slots = [slot for _, slot in members]
    return NativeTable(
        [slot.param for slot in slots],
        kind=kind,
        states=[state[slot.param] for slot in slots],
        shapes=[stored_shape(slot) for slot in slots],
        seeds=[rounding_seed(slot.name, first=slot.offset) % 2**32 for slot in slots],
    )


# -- what the C++ step needs to know: the kind that steps a parameter, its settings, thresholds ------------------------


def native_refusal(spec: OptimizerSpec) -> str:
    """Why there is no native step for the spec; empty if there is."""
    rule, storage = RULES[spec.rule].info, STORAGES[spec.storage]
    if not (rule.name in _ELEMENTWISE or rule.name in _TRANSPOSED or fold_of(rule) > 1):
        return f"there is no native step for rule {rule.name}"
    unknown = {storage.codec(decl) for decl in rule.states} - set(NATIVE_CODECS)
    if unknown:
        return f"there is no native step for states kept as {', '.join(sorted(unknown))}"
    if spec.weights not in ("native", *NATIVE_WEIGHTS):
        return f"there is no native step for {spec.weights} weights"
    return ""


def fold_of(rule: RuleInfo) -> int:
    """Elements that one state of FOAM stands for; 1 of other rules."""
    folded = rule.name.startswith("foam") and rule.states[0].layout is StateLayout.FOLDED
    return 2 ** rule.states[0].level if folded else 1


def kind_of(slot: Slot) -> NativeKind:
    """The kind of native step that a parameter takes."""
    rule, codecs = slot.rule.info, {state.decl.name: state.codec.info.name for state in slot.states}
    name, fold, weights = rule.name, fold_of(rule), slot.weights
    if fold > 1:
        name = "foam"
    elif slot.info.transposed:
        name = _TRANSPOSED.get(name, name)
    if weights in ("native", "bf16"):
        weights = "bf16" if slot.param.dtype is torch.bfloat16 else "fp32"
    return NativeKind(rule=name, m=codecs.get("m", "fp32"), v=codecs.get("v", "fp32"), weights=weights, fold=fold)


def stored_shape(slot: Slot) -> tuple[int, int]:
    """(rows, columns) of the matrix as it lies in memory; one row if there is no matrix."""
    rows, cols = slot.matrix or (1, slot.param.numel())
    return (cols, rows) if slot.info.transposed else (rows, cols)


def settings_of(rule: RuleInfo, options: Options, *, step: int) -> tuple[tuple[float, ...], float]:
    """(settings of a rule in one step as `NativeTable.run` takes them, divisor of its update)."""
    (beta1, beta2), lr = options.betas, options.lr
    decay = 1 - lr * options.weight_decay
    if rule.name in SIGNS:
        return (decay, -lr, 1 - beta1, 0.0, 1 - min(beta2, LION_DECAY), 1.0, 0.0), 1.0
    divisor, bc2 = 1 - beta1**step, (1 - beta2**step) ** 0.5
    if rule.name == "rmsprop":
        divisor = 1.0
    elif fold_of(rule) > 1:
        divisor = divisor / bc2 / _FOAM_ALPHA
    return (decay, -(lr / divisor), 1 - beta1, beta2, 1 - beta2, bc2, options.eps), divisor


@lru_cache(maxsize=4)
def thresholds_of(phase: int) -> Tensor:
    """fp32 [THRESHOLDS]: the lanes of a step, then 1/2 in place of each, both with lattice4's thresholds for them."""
    plain = lanes(phase, _CPU)
    thresholds = torch.cat([_with_lattice(plain), _with_lattice(torch.full_like(plain, 0.5))])
    assert thresholds.numel() == THRESHOLDS
    return thresholds


def _with_lattice(plain: Tensor) -> Tensor:
    """Thresholds, fp32 [32], followed by those of lattice4 for k = 0 ... 3: fp32 [160]."""
    per_unit = torch.tensor([[8.0], [4.0], [2.0], [1.0]], device=_CPU) / 4  # octaves of v, for k = 0 ... 3
    lattice = torch.log1p((torch.exp2(per_unit) - 1) * plain).div_(per_unit * log(2))
    return torch.cat([plain, lattice.view(-1)])
