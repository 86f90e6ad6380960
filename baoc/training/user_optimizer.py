"""Reads what the user's optimizer says and hands its schedulers over to ours; refuses what would change its meaning."""

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from baoc.errors import BadInputError, unknown_name
from baoc.training.session import SessionSettings
from baoc.types import Budget

log = logging.getLogger(__name__)
# Switches of torch's Adam family that choose an implementation, not an arithmetic: ours has its own.
IMPLEMENTATION_KEYS = {"foreach", "fused", "capturable", "differentiable"}
REFUSED_KEYS = ("amsgrad", "maximize")
SPLIT_ROWS = "*+split8"
ROUNDED_ROWS = "*+bf16_sr"


def hyperparameters(optimizer: Optimizer, *, said: str = "configure_optimizers returned") -> dict[str, Any]:
    """lr, betas, eps and weight_decay of the user's AdamW (or Adam without weight decay), as our optimizer's defaults.

    Raises BadInputError for any other optimizer, and for switches that the rules here do not have. `said`: how the
    optimizer came here, for the message.
    """
    groups = optimizer.param_groups
    decays = any(group.get("weight_decay", 0) for group in groups)
    decoupled = isinstance(optimizer, torch.optim.AdamW) or any(g.get("decoupled_weight_decay") for g in groups)
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) or (decays and not decoupled):
        raise BadInputError(
            f"{said} {type(optimizer).__name__}"
            f"{' with coupled weight decay' if isinstance(optimizer, torch.optim.Adam) else ''}: BAOC takes over "
            "torch.optim.AdamW (or Adam without weight decay), whose lr, betas, eps and weight_decay it keeps. Give "
            "it one of these, or train without BAOC"
        )
    for key in REFUSED_KEYS:
        if any(group.get(key) for group in groups):
            raise BadInputError(f"the optimizer sets {key}=True, which no rule here has: leave it out")
    keys = ("lr", "betas", "eps", "weight_decay")
    return {key: optimizer.defaults[key] for key in keys}


def check_switches(switches: Mapping[str, Any]) -> None:
    """Takes the arguments of torch's AdamW that choose an implementation, with a word; raises BadInputError for those
    that change its meaning."""
    for key, value in switches.items():
        if key not in (*IMPLEMENTATION_KEYS, *REFUSED_KEYS):
            allowed = ("lr", "betas", "eps", "weight_decay", *sorted(IMPLEMENTATION_KEYS), *REFUSED_KEYS)
            raise unknown_name(key, what="argument", allowed=allowed)
        if value and (key in REFUSED_KEYS or key == "differentiable"):
            raise BadInputError(f"the optimizer sets {key}=True, which no rule here has: leave it out")
    given = [f"{key}={value}" for key, value in switches.items() if value and key in IMPLEMENTATION_KEYS]
    if given:
        log.info("%s has no effect: BAOC chooses how it steps (SessionSettings(backend=...))", ", ".join(given))


def named_groups(optimizer: Optimizer, module: nn.Module) -> list[dict[str, Any]]:
    """The user's parameter groups with (name, parameter) pairs; every other key as it is. Tied parameters come once.

    Raises BadInputError for a parameter that is not the module's.
    """
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
    """The user's parameter groups without torch's switches; every other key as it is."""
    left_out = (*IMPLEMENTATION_KEYS, *REFUSED_KEYS, "decoupled_weight_decay")
    return [{key: value for key, value in group.items() if key not in left_out} for group in optimizer.param_groups]


def count_steps_for_schedulers(optimizer: Optimizer) -> None:
    """Lets `optimizer.step` say that it was called, as torch's schedulers arrange for the optimizer they are built on.

    Without it they warn that the optimizer they were rebound to had its step overridden.
    """
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
    """Makes every scheduler that steps `old` step `new` instead, those inside SequentialLR and ChainedScheduler too."""
    for scheduler in schedulers:
        if isinstance(scheduler, LRScheduler | ReduceLROnPlateau) and scheduler.optimizer is old:
            scheduler.optimizer = new
        rebind_schedulers(getattr(scheduler, "_schedulers", ()), old=old, new=new)


def widened(settings: SessionSettings, *, device: str, budget: Budget, precision: str) -> SessionSettings:
    """Adds `*+split8` to a catalogue that was left open, where a memory budget on CUDA can use it.

    Open is `*`, or `*` with `*@streamed`, which `*+split8@streamed` then joins. Weights that are rounded at random are
    offered to the measured choice alone, which takes them last.
    Weights kept in 16 bits with a correction save as much as a moment in 32 bits; layers take them under bf16 autocast
    or in a bf16 model. Elsewhere results stay those of native weights.
    """
    fitting = device == "cuda" and budget.memory_bytes is not None and precision in ("bf16-mixed", "bf16-true")
    more = {("*",): (SPLIT_ROWS,), ("*", "*@streamed"): (SPLIT_ROWS, f"{SPLIT_ROWS}@streamed")}.get(
        tuple(settings.planner.specs)
    )
    if not fitting or more is None:
        return settings
    planner = replace(settings.planner, specs=(*settings.planner.specs, *more), measured_specs=(ROUNDED_ROWS,))
    return replace(settings, planner=planner)


def declared_blocks(module: nn.Module) -> dict[str, list[str]] | None:
    """Blocks that the module declares by `parameter_blocks()`, or the network in its `model` or `net` does; names are
    those of the module."""
    children = ((f"{name}.", getattr(module, name, None)) for name in ("model", "net", "network"))
    inner = ((prefix, child) for prefix, child in children if isinstance(child, nn.Module))
    for prefix, declares in (*inner, ("", module)):
        blocks: Any = getattr(declares, "parameter_blocks", None)
        if blocks is not None:
            return {block: [prefix + name for name in names] for block, names in blocks().items()}
    return None
