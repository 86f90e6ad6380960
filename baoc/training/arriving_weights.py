"""Weights that a budget does not hold in full: they wait on the host until a plan knows what is kept of them.

What is decided before is looked at with 16 bits in their place, and the optimizer then takes them in block by block
(`BlockwiseOptimizer`'s `device`), so that they never are on the device together. Weights that it holds come at once.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from baoc.core.catalogue import select
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
MIXED = ("bf16-mixed", "bf16-true")  # precisions whose layers take weights of 16 bits


def weights_bytes(module: nn.Module) -> int:
    """Bytes of parameters and buffers as they are, each once."""
    return sum(value.nbytes for value in {*module.parameters(), *module.buffers()})


def _least_bytes(module: nn.Module, *, context_bytes: int) -> int:
    """Of a device that has nothing but the weights as they are: with the context, and the allocator's pages."""
    return weights_bytes(module) + context_bytes + LATE_MODULES_BYTES + PAGES_BYTES


def must_wait(module: nn.Module, *, device: torch.device, budget: Budget, context_bytes: int) -> bool:
    """Whether the weights in full alone are more than the budget leaves on this device beside its pages."""
    if device.type != "cuda" or budget.memory_bytes is None:
        return False
    return _least_bytes(module, context_bytes=context_bytes) > budget.memory_bytes


def no_room(module: nn.Module, *, budget: Budget, context_bytes: int) -> InfeasibleBudgetError:
    """The refusal where not even a look outside of the cap can tell what would fit."""
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
def visiting(
    module: nn.Module, *, narrow: Mapping[str, Tensor], device: torch.device, budget: Budget, context_bytes: int = 0
) -> Iterator[None]:
    """Inside, `module` is on `device`, of its parameters those in `narrow` in 16 bits; these wait on the host, in full,
    before and afterwards, and the others stay.

    Where that passes the cap it comes outside of it, for a refusal to name what would fit. Raises
    InfeasibleBudgetError where the device has no room at all.
    """
    with ExitStack() as stack:
        try:
            _come(module, stack=stack, narrow=narrow, device=device)
        except torch.OutOfMemoryError:
            stack.close()
            clear_cache(device)
            try:
                with uncapped(device, budget=budget):
                    _come(module, stack=stack, narrow=narrow, device=device)
            except torch.OutOfMemoryError:
                stack.close()
                raise no_room(module, budget=budget, context_bytes=context_bytes) from None
        yield


def _come(module: nn.Module, *, stack: ExitStack, narrow: Mapping[str, Tensor], device: torch.device) -> None:
    stack.enter_context(cast_to_bf16(narrow, device=device))
    module.to(device)


def needs_room(plan: Plan, *, footprint: Footprint | None) -> bool:
    """Whether the optimizer's states may find no room beside weights that are on the device in full, before these are
    narrowed."""
    memory = plan.budget.memory_bytes
    if (
        footprint is None
        or not footprint.device.startswith("cuda")
        or memory is None
        or not plan.allocation.saved_bytes
    ):
        return False
    fixed = footprint.context_bytes + footprint.reserve_bytes + footprint.profile_bytes
    return footprint.weights_bytes + plan.allocation.state_bytes + fixed > memory


def leave(params: Mapping[str, Tensor]) -> None:
    """Puts parameters on the host, as they are."""
    for param in params.values():
        param.grad = None
        param.data = param.detach().cpu()


class ArrivedWeights:
    """Weights in all of their bits of those parameters that a plan keeps in fewer, as they are when it is made.

    For a resume whose checkpoint has another plan, by which some of them are to be whole again. Between loading and
    training the module and callbacks may have put other numbers into the model than the file has (averages swap theirs
    with the current ones), and those stay. `narrowed` is to be called when the optimizer has been built.
    """

    def __init__(self, session: Session):
        narrow = select(session.settings.planner.specs)
        choices, params = session.plan.allocation.choices, session.params
        names = [
            info.name
            for block in session.plan.blocks
            for info in block.params
            if choices[block.name] in narrow and narrow[choices[block.name]].weights != "native"
        ]
        self._params = {name: params[name] for name in names if params[name].element_size() > BF16.itemsize}
        self._whole = {name: param.detach().to("cpu", copy=True) for name, param in self._params.items()}
        self._versions: dict[str, int] = {}

    def narrowed(self) -> None:
        self._versions = {name: param._version for name, param in self._params.items()}

    def untouched(self) -> dict[str, Tensor]:
        """The weights of parameters that nobody has written to since they were narrowed."""
        return {
            name: self._whole[name] for name, param in self._params.items() if param._version == self._versions[name]
        }


class Between:
    """What becomes of weights between fits.

    A pass that trains nothing may hold those in 16 bits that are bf16 numbers, as split weights from a checkpoint are.
    And a fit leaves them as its optimizer keeps them, with corrections beside; the next one begins with the numbers
    that they stand for, in the types in which they came.
    """

    def __init__(self) -> None:
        self._whole: dict[Tensor, torch.dtype] = {}
        self._left: list[tuple[BlockwiseOptimizer, dict[Tensor, int]]] = []

    def leave(self, optimizer: BlockwiseOptimizer) -> None:
        """A fit is over."""
        slots = [slot for live in optimizer.registry.live.values() for slot in live.slots]
        self._left.append((optimizer, {slot.param: slot.param._version for slot in slots}))

    @torch.no_grad()
    def resume(self, module: nn.Module) -> None:
        """Another one begins. Weights that were written to since, by a checkpoint say, are what they are now."""
        left, self._left = self._left, []
        mine = set(module.parameters())
        for optimizer, versions in left:
            registry = optimizer.registry
            for live in registry.live.values():
                with registry.visiting(live, keep=False):
                    for slot in live.slots:
                        dtype = getattr(torch, slot.info.dtype)
                        if slot.param in mine and slot.param.dtype is not dtype:
                            same = slot.param._version == versions.get(slot.param)
                            slot.param.data = master(slot.param, registry.state[slot.param] if same else {}).to(dtype)

    def narrow(self, module: nn.Module) -> None:
        """Parameters that lose nothing become bf16, where they are."""
        for param in module.parameters():
            near = param.detach().to(BF16)
            if param.element_size() > BF16.itemsize and torch.equal(near.to(param.dtype), param.detach()):
                self._whole[param] = param.dtype
                param.data = near

    def widen(self) -> None:
        """They are as they were; to be called when they are on the host again."""
        for param, dtype in self._whole.items():
            param.data = param.detach().to(dtype)
        self._whole.clear()
