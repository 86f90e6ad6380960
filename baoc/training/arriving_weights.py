"""Weights that the memory budget cannot hold in full precision: they stay in CPU memory until there is a plan.

1. `must_wait` says whether they stay there. Weights that the budget holds go to the device at once.
2. Measurements before the plan run with bf16 in their place (`on_device_as_bf16`).
3. The optimizer moves them to the device block by block, in their final format (`BlockwiseOptimizer`'s `device`), so
   the full weights are never there together. `needs_room` says whether those on the device go back (`move_to_host`).
4. `ArrivedWeights` serves a resume under another plan. `WeightsBetweenFits` restores weights between fits.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from baoc.errors import InfeasibleBudgetError
from baoc.optim import BlockwiseOptimizer
from baoc.optim.weights import master
from baoc.profiling import clear_cache, uncapped
from baoc.profiling.bf16_params import BF16, cast_to_bf16
from baoc.profiling.footprint import PAGES_BYTES
from baoc.profiling.memory import LATE_MODULES_BYTES
from baoc.training.session import Session
from baoc.types import Budget, Footprint, Plan
from baoc.units import format_bytes

ADVICE = ("a smaller model.size", "weights of fewer bits to begin with (trainer.precision=bf16-true)")
MIXED = ("bf16-mixed", "bf16-true")  # precisions whose layers accept bf16 weights


def weights_bytes(module: nn.Module) -> int:
    """Bytes of parameters and buffers in their present types; shared ones count once."""
    return sum(value.nbytes for value in {*module.parameters(), *module.buffers()})


def _least_bytes(module: nn.Module, *, context_bytes: int) -> int:
    """Bytes of a device that holds only these weights: with the CUDA context and the allocator's pages."""
    return weights_bytes(module) + context_bytes + LATE_MODULES_BYTES + PAGES_BYTES


def must_wait(module: nn.Module, *, device: torch.device, budget: Budget, context_bytes: int) -> bool:
    """True if the weights in their present types exceed the budget's memory, on a CUDA device."""
    if device.type != "cuda" or budget.memory_bytes is None:
        return False
    return _least_bytes(module, context_bytes=context_bytes) > budget.memory_bytes


def no_room(module: nn.Module, *, budget: Budget, context_bytes: int) -> InfeasibleBudgetError:
    """The error for weights that do not fit even for a measurement, so that the least budget is unknown."""
    needed = _least_bytes(module, context_bytes=context_bytes)
    memory = budget.memory_bytes or 0
    return InfeasibleBudgetError(
        f"budget {budget.name} cannot be met: it allows {format_bytes(memory)} of device memory ({memory} bytes), and "
        f"the weights as they are used take {format_bytes(needed)} ({needed} bytes) with the CUDA context. What would "
        f"lower it: {'; '.join(ADVICE)}",
        budget_bytes=memory,
        least_feasible_bytes=needed,
        advice=ADVICE,
    )


@contextmanager
def on_device_as_bf16(
    module: nn.Module,
    *,
    bf16_params: Mapping[str, Tensor],
    device: torch.device,
    budget: Budget,
    context_bytes: int = 0,
) -> Iterator[None]:
    """Inside, `module` is on `device`, with bf16 values in `bf16_params`, whose exact values are on the host.
    Afterwards these are back on the host; all others stay on the device.

    If bf16 exceeds the cap too, the module moves without the cap, so that the planner can still name a budget that
    would fit. Raises InfeasibleBudgetError if the device itself has no room.
    """
    with ExitStack() as stack:

        def move() -> None:
            stack.enter_context(cast_to_bf16(bf16_params, device=device))
            module.to(device)

        try:
            move()
        except torch.OutOfMemoryError:
            stack.close()
            clear_cache(device)
            try:
                with uncapped(device, budget=budget):
                    move()
            except torch.OutOfMemoryError:
                stack.close()
                raise no_room(module, budget=budget, context_bytes=context_bytes) from None
        yield


def needs_room(plan: Plan, *, footprint: Footprint | None) -> bool:
    """True if states and native weights together may exceed the budget before the plan's weights become bf16."""
    memory = plan.budget.memory_bytes
    if footprint is None or memory is None or not (footprint.device.startswith("cuda") and plan.allocation.saved_bytes):
        return False
    fixed = footprint.context_bytes + footprint.reserve_bytes + footprint.profile_bytes
    return footprint.weights_bytes + plan.allocation.state_bytes + fixed > memory


def move_to_host(params: Mapping[str, Tensor]) -> None:
    """Moves parameters to the host in their present types and drops their gradients."""
    for param in params.values():
        param.grad = None
        param.data = param.detach().cpu()


class ArrivedWeights:
    """Native copies, in CPU memory, of the parameters that the plan keeps in bf16, made on construction for a resume
    from another plan, under which some are native.

    They are of what module and callbacks left in the model after loading, which may differ from the file (weight
    averages swap places with current weights). Call `note_versions` when the optimizer has been built.
    """

    def __init__(self, session: Session):
        narrow = session.settings.planner.all_specs
        choices, params = session.plan.allocation.choices, session.params
        names = [
            info.name
            for block in session.plan.blocks
            for info in block.params
            if choices[block.name] in narrow and narrow[choices[block.name]].weights != "native"
        ]
        self._params = {name: params[name] for name in names if params[name].element_size() > BF16.itemsize}
        self._native = {name: param.detach().to("cpu", copy=True) for name, param in self._params.items()}
        self._versions: dict[str, int] = {}

    def note_versions(self) -> None:
        self._versions = {name: param._version for name, param in self._params.items()}

    def untouched(self) -> dict[str, Tensor]:
        """Parameter name -> native weights, of the parameters that were not written to since `note_versions`."""
        return {
            name: self._native[name] for name, param in self._params.items() if param._version == self._versions[name]
        }


class WeightsBetweenFits:
    """Restores weights between fits.

    A fit leaves weights in the formats of its specs, with corrections in the optimizer's states. `end_fit` and
    `begin_fit` restore their exact values in native types for the next fit. For a pass without training, `narrow`
    converts weights to bf16 that lose nothing by it, such as split weights from a checkpoint, and `widen` undoes it.
    """

    def __init__(self) -> None:
        self._dtypes: dict[Tensor, torch.dtype] = {}
        self._ended: list[tuple[BlockwiseOptimizer, dict[Tensor, int]]] = []

    def end_fit(self, optimizer: BlockwiseOptimizer) -> None:
        """Ends a fit: keeps its optimizer and the versions of its parameters."""
        slots = [slot for live in optimizer.registry.live.values() for slot in live.slots]
        self._ended.append((optimizer, {slot.param: slot.param._version for slot in slots}))

    @torch.no_grad()
    def begin_fit(self, module: nn.Module) -> None:
        """Begins another fit. Weights written to since the last one, as by a checkpoint, keep their values."""
        ended, self._ended = self._ended, []
        own = set(module.parameters())
        for optimizer, versions in ended:
            registry = optimizer.registry
            for live in registry.live.values():
                with registry.states_on_device(live, write_back=False):
                    for slot in live.slots:
                        dtype = getattr(torch, slot.info.dtype)
                        if slot.param in own and slot.param.dtype is not dtype:
                            same = slot.param._version == versions.get(slot.param)
                            slot.param.data = master(slot.param, registry.state[slot.param] if same else {}).to(dtype)

    def narrow(self, module: nn.Module) -> None:
        """Makes parameters bf16, on their device, where that loses nothing."""
        for param in module.parameters():
            rounded = param.detach().to(BF16)
            if param.element_size() > BF16.itemsize and torch.equal(rounded.to(param.dtype), param.detach()):
                self._dtypes[param] = param.dtype
                param.data = rounded

    def widen(self) -> None:
        """Undoes `narrow`. Call it when the parameters are on the host again."""
        for param, dtype in self._dtypes.items():
            param.data = param.detach().to(dtype)
        self._dtypes.clear()
