"""Takes over the user's AdamW (groups, hyperparameters, learning-rate schedules), and refuses arguments, callbacks and
weight averages that are not supported."""

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from inspect import signature
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from baoc.errors import BadInputError, unknown_name
from baoc.optim.groups import to_plain as to_numbers
from baoc.planning.allocators import ALLOCATORS
from baoc.training.session import SessionSettings, bf16_weight_specs
from baoc.types import Budget, to_plain

log = logging.getLogger(__name__)
# Arguments of torch's Adam family that choose an implementation and not the arithmetic: backends replace them.
IMPLEMENTATION_KEYS = {"foreach", "fused", "capturable", "differentiable"}
HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")
REFUSED_KEYS = ("amsgrad", "maximize")
SPLIT_ROWS = "*+split8"
ROUNDED_ROWS = "*+bf16_sr"


def hyperparameters(optimizer: Optimizer, *, said: str = "configure_optimizers returned") -> dict[str, Any]:
    """lr, betas, eps and weight_decay of the user's AdamW (or Adam without weight decay), as our optimizer's defaults.
    Raises BadInputError for any other optimizer, for amsgrad and for maximize; the message begins with `said`."""
    groups = optimizer.param_groups
    decays = any(group.get("weight_decay", 0) for group in groups)
    decoupled = isinstance(optimizer, torch.optim.AdamW) or any(g.get("decoupled_weight_decay") for g in groups)
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) or (decays and not decoupled):
        kind = type(optimizer).__name__
        raise BadInputError(
            f"{said} {'None' if kind == '_MockOptimizer' else kind}"  # Lightning's place-holder for no optimizer
            f"{' with coupled weight decay' if isinstance(optimizer, torch.optim.Adam) else ''}: BAOC takes over "
            "torch.optim.AdamW (or Adam without weight decay), whose lr, betas, eps and weight_decay it keeps. Give "
            "it one of these, or train without BAOC"
        )
    for key in REFUSED_KEYS:
        if any(group.get(key) for group in groups):
            raise BadInputError(f"the optimizer sets {key}=True, which no rule here has: leave it out")
    return {key: optimizer.defaults[key] for key in HYPERPARAMETERS}


def shared_by_ranks(
    *,
    params: Mapping[str, torch.Tensor] = {},
    groups: Sequence[Mapping[str, Any]] = (),
    settings: SessionSettings | None = None,
    **others: object,
) -> dict[str, object]:
    """What all ranks have to be given alike, by its name in a message, for `check_same_on_ranks`."""
    trained = {True: "", False: ", frozen"}
    given: dict[str, object] = {}
    for name, param in params.items():
        shape = None if is_lazy(param) else tuple(param.shape)  # refused by its own message later
        given[name] = f"{shape} {param.dtype}{trained[param.requires_grad]}"
    given["the order of parameters"] = list(params)
    for index, group in enumerate(groups):
        kept = {key: to_numbers(group[key]) for key in HYPERPARAMETERS if key in group}
        given |= {f"{key} of parameter group {index}": value for key, value in kept.items()}
    if settings is not None:
        given |= {**to_plain(settings), **to_plain(settings.planner), "planner": ""}
    return {**given, **to_plain(others)}


def check_arguments(given: Iterable[str], *doors: Callable[..., object], also: Iterable[str] = ()) -> None:
    """Raises BadInputError for an argument that none of the classes `doors` takes."""
    listed = [one for door in doors for one in signature(door).parameters.values()]
    named = [one.name for one in listed if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)]
    takes = [name for name in dict.fromkeys(named) if name not in ("params", "module")]
    for name in given:
        if name == "race":
            raise BadInputError(
                "race is an argument of run.py, which trains the runs of a race: python run.py mode=race. Here "
                "recipe=FILE takes what one has chosen, outputs/races/NAME.json"
            )
        if name not in (*takes, *also):
            raise unknown_name(name, what="argument", allowed=dict.fromkeys((*takes, *also)))


def check_switches(switches: Mapping[str, Any], *, door: Callable[..., object]) -> None:
    """Logs which switches of torch's AdamW have no effect. Raises BadInputError if one changes the arithmetic."""
    check_arguments(switches, door, also=(*sorted(IMPLEMENTATION_KEYS), *REFUSED_KEYS))
    for key, value in switches.items():
        if value and (key in REFUSED_KEYS or key == "differentiable"):
            raise BadInputError(f"the optimizer sets {key}=True, which no rule here has: leave it out")
    given = [f"{key}={value}" for key, value in switches.items() if value and key in IMPLEMENTATION_KEYS]
    if given:
        log.info("%s has no effect: BAOC chooses how it steps (SessionSettings(backend=...))", ", ".join(given))


def named_groups(optimizer: Optimizer, module: nn.Module) -> list[dict[str, Any]]:
    """The user's parameter groups with (name, parameter) pairs, tied ones once; every other key as it is. Raises
    BadInputError for a parameter that is not the module's."""
    names = {id(param): name for name, param in module.named_parameters()}
    groups = []
    for group in groups_of(optimizer):
        strangers = [tuple(p.shape) for p in group["params"] if id(p) not in names]
        if strangers:
            raise BadInputError(
                f"the optimizer holds {len(strangers)} parameter(s) that the module does not have, of shape "
                f"{strangers[0]}: states are kept by parameter name, so register them on the {type(module).__name__}"
            )
        kept = {key: value for key, value in group.items() if key != "param_names"}
        groups.append({**kept, "params": [(names[id(param)], param) for param in group["params"]]})
    return groups


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The user's parameter groups without torch's implementation switches; other keys stay."""
    left_out = (*IMPLEMENTATION_KEYS, *REFUSED_KEYS, "decoupled_weight_decay")
    return [{key: value for key, value in group.items() if key not in left_out} for group in optimizer.param_groups]


def count_steps_for_schedulers(optimizer: Optimizer) -> None:
    """Lets `optimizer.step` note its calls, as torch's schedulers do to the one that they are built on. Without it,
    schedulers that are rebound to the optimizer warn that its step was overridden."""
    plain, me = type(optimizer).step, weakref.ref(optimizer)

    @wraps(plain)
    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer = me()
        assert optimizer is not None
        optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
        return plain(optimizer, *args, **kwargs)

    setattr(step, "_wrapped_by_lr_sched", True)  # noqa: B010 - a name of torch's that no type knows
    optimizer.step = step


def rebind_schedulers(schedulers: Sequence[Any], *, old: Optimizer, new: Optimizer) -> None:
    """Makes schedulers of `old` step `new`, including those inside SequentialLR and ChainedScheduler."""
    for scheduler in schedulers:
        if isinstance(scheduler, LRScheduler | ReduceLROnPlateau) and scheduler.optimizer is old:
            scheduler.optimizer = new
        rebind_schedulers(getattr(scheduler, "_schedulers", ()), old=old, new=new)


def widened(settings: SessionSettings, *, device: str, budget: Budget, precision: str) -> SessionSettings:
    """Adds `*+split8` to an open catalogue where a memory budget on CUDA can use it: such weights save as much as a
    32-bit moment, and layers accept them under bf16 autocast or in a bf16 model.

    An open catalogue is `*`, or `*` with `*@streamed`, which gets `*+split8@streamed` too. Stochastically rounded
    weights are offered only to the measured choice, which takes them last.
    """
    fitting = device == "cuda" and budget.memory_bytes is not None and precision in ("bf16-mixed", "bf16-true")
    more = {("*",): (SPLIT_ROWS,), ("*", "*@streamed"): (SPLIT_ROWS, f"{SPLIT_ROWS}@streamed")}.get(
        tuple(settings.planner.specs)
    )
    if not fitting or more is None:
        return settings
    planner = replace(settings.planner, specs=(*settings.planner.specs, *more), measured_specs=(ROUNDED_ROWS,))
    return replace(settings, planner=planner)


def averaging_callbacks(trainer: L.Trainer) -> list[str]:
    """Names of callbacks and submodules that average weights by reading the parameters."""
    callbacks: list[L.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    found = [
        type(callback).__name__
        for callback in callbacks
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging)
        or any(isinstance(value, AveragedModel) for value in vars(callback).values())
    ]
    return found + [name for name, part in trainer.lightning_module.named_modules() if isinstance(part, AveragedModel)]


def without_bf16(settings: SessionSettings, *, because: Sequence[str]) -> SessionSettings:
    """The settings without specs that keep bf16 weights, whose corrections averages of weights would miss. Raises
    BadInputError if a recipe or an allocator asks for such specs."""
    planner = settings.planner
    rows, narrow = planner.all_specs, [spec.name for spec in bf16_weight_specs(planner)]
    only = ALLOCATORS[planner.allocator].traits.only_spec
    if not narrow:
        return settings
    readers = ", ".join(because)
    if planner.recipe is not None or only in narrow or len(narrow) == len(rows):
        raise BadInputError(
            f"{readers} averages weights, and {', '.join(narrow[:3])} keeps them in 16 bits with a correction that an "
            "average does not see: leave one of the two out"
        )
    log.warning("%s averages weights, so that specs with weights of 16 bits are left out: %s", readers, narrow[0])
    kept = tuple(name for name in rows if name not in narrow)
    return replace(settings, planner=replace(planner, specs=kept, measured_specs=()))
