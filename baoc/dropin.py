"""BaocOptimizer: a budgeted optimizer for a plain PyTorch loop, built like any torch optimizer.

The loop stays as it is; the optimizer plans when it is built, watches gradients inside `step()`, and reallocates there.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from baoc.budgets import parse_budget, resolve_auto
from baoc.errors import BadInputError
from baoc.online import ReallocationSettings, Reallocator, SessionSettings
from baoc.online.assemble import make_profiler, with_profile_bytes
from baoc.optim import BlockwiseOptimizer
from baoc.planner import Planner
from baoc.profiling import (
    FirstStepMemory,
    cap_device,
    context_bytes,
    describe,
    free_bytes,
    probe_footprint,
)
from baoc.types import Budget, Plan

PLAIN_WARMUP_STEPS = 100


class BaocOptimizer(BlockwiseOptimizer):
    """AdamW's arguments and a budget; which rule and storage each block gets is planned, and planned again.

    `params` is a module, named parameters, plain parameters, or groups of either (a module or names make the plan and
    checkpoints readable). `probe` is a callable that runs one forward and backward on a typical batch; with it a memory
    budget is planned before anything is trained. Without it the first step runs on the plan of least state, the memory
    of that step is measured, and InfeasibleBudgetError may come from the first `step()`.

    `plan` is the plan in force. Warm-up is counted in steps (100 unless `settings` says otherwise).
    """

    def __init__(
        self,
        params: Any,
        *,
        budget: str | int | float | Mapping[str, Any] | Budget = "auto",
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        probe: Callable[[], object] | None = None,
        settings: SessionSettings | None = None,
    ):
        settings = settings or SessionSettings(reallocation=ReallocationSettings(warmup_steps=PLAIN_WARMUP_STEPS))
        module = params if isinstance(params, nn.Module) else None
        named, groups = name_parameters(params)
        device = next((p.device for p in named.values()), torch.device("cpu"))
        limit = resolve_auto(parse_budget(budget), free_bytes=free_bytes(device))
        needs_memory = limit.memory_bytes is not None
        cap_device(device, budget=limit)
        footprint = None
        if needs_memory and probe is not None:
            footprint = probe_footprint(
                module if module is not None else list(named.values()),
                run_micro_batch=probe,
                context_bytes=context_bytes(device),
            )
        unknown = needs_memory and probe is None
        planner = Planner(
            describe(module if module is not None else named, optimizer_groups=groups),
            budget=Budget(name=limit.name) if unknown else limit,
            settings=settings.planner,
            declared=module.parameter_blocks() if hasattr(module, "parameter_blocks") else None,  # pyright: ignore
            footprint=footprint,
        )
        profiler = make_profiler(planner, named, settings=settings, betas=betas)
        planner.footprint = with_profile_bytes(footprint, profiler)
        plan = planner.least() if unknown else planner.propose(risk="prior")
        super().__init__(
            groups,
            plan.allocation.choices,
            blocks=planner.blocks,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            backend=settings.backend,
            nonfinite=settings.nonfinite,
            rms_matching=settings.rms_matching,
        )
        self.reallocator = Reallocator(
            planner=planner, optimizer=self, plan=plan, settings=settings.reallocation, profiler=profiler
        )
        if unknown:
            self._first_step = FirstStepMemory(list(named.values()), context_bytes=context_bytes(device))
            self._limit = limit
            self.register_step_post_hook(lambda *_: self._learn_footprint())
        self.reallocator.attach()

    @property
    def plan(self) -> Plan:
        return self.reallocator.plan

    def _learn_footprint(self) -> None:
        """After the very first step: the memory of its forward and backward is known, so the budget can be planned."""
        if self._first_step is None:
            return
        planner = self.reallocator.planner
        planner.footprint = with_profile_bytes(
            self._first_step.finish(state_bytes=self.state_bytes()), self.reallocator.profiler
        )
        self._first_step = None
        planner.budget = self._limit
        self.reallocator.replan(why="the first step told what forward and backward need")

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The blockwise state, and under `online` what the reallocator needs to go on."""
        return {**super().state_dict(), "online": self.reallocator.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the saved allocation where it meets the budget, then the states, converting where they differ."""
        state = dict(state_dict)
        online = state.pop("online", None)
        if online is not None:
            self.reallocator.load_state_dict(online)
        super().load_state_dict(state)


def name_parameters(params: Any) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Any spelling of parameters -> trainable ones by name, and groups of (name, parameter) pairs.

    Plain parameters are named `param0`, `param1`, ... in order. Raises BadInputError where nothing is trainable.
    """
    if isinstance(params, nn.Module):
        params = params.named_parameters()
    items: list[Any] = [params] if isinstance(params, Tensor) else list(params)
    grouped = bool(items) and isinstance(items[0], Mapping)
    groups: list[dict[str, Any]] = [dict(item) for item in items] if grouped else [{"params": items}]
    count = 0
    named: dict[str, Tensor] = {}
    for group in groups:
        members: Iterable[Any] = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        pairs = []
        for member in members:
            name, param = member if isinstance(member, tuple) else (f"param{count}", member)
            count += 1
            if param.requires_grad:
                pairs.append((name, param))
                named[name] = param
        group["params"] = pairs
    if not named:
        raise BadInputError("no trainable parameter was given: pass a module, model.parameters() or parameter groups")
    return named, groups
