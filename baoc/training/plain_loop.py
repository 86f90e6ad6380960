"""BaocOptimizer: a budgeted optimizer for a plain PyTorch loop, built like any torch optimizer.

The loop stays as it is; the optimizer plans when it is built, watches gradients inside `step()`, and reallocates there.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from baoc.core.budgets import parse_budget, resolve_auto
from baoc.core.catalogue import SPECS, on_device, select
from baoc.errors import BadInputError, CheckpointError
from baoc.optim import BlockwiseOptimizer, GradientRelease
from baoc.optim.backward import take_from_others
from baoc.optim.groups import check_names, check_settings, check_tensor, members_of, plain, raw_groups
from baoc.optim.load_watch import watch_loads
from baoc.parallel import ALONE, ranks, refuse_ranks, unwrapped
from baoc.profiling import (
    FirstStepMemory,
    cap_device,
    context_bytes,
    describe,
    free_bytes,
    uncapped,
)
from baoc.profiling.bf16_params import cast_to_bf16
from baoc.profiling.memory import settle_allocator
from baoc.training.arriving_weights import leave, needs_room
from baoc.training.measure.caller_probe import CallerProbe
from baoc.training.measure.probe import unwrapped as declaring
from baoc.training.own_words import in_own_words
from baoc.training.reallocation import ReallocationSettings
from baoc.training.session import RecipeLike, Session, SessionSettings, make_profiler, with_recipe
from baoc.training.user_optimizer import declared_blocks, widened
from baoc.types import Budget, Plan, profile_from_plain

PLAIN_WARMUP_STEPS = 100


class BaocOptimizer(BlockwiseOptimizer):
    """AdamW with a budget: the planner chooses the spec of every block, and chooses again after the warm-up.

    `plan` is the plan in force. `lr`, `betas`, `eps` and `weight_decay` are those of `torch.optim.AdamW`.

    In a process group it is built, stepped and saved by all ranks together, over DistributedDataParallel: the plan is
    rank 0's, made by what the rank measured that needs most, and so is each later decision.

    Args:
        params: A module, named parameters, plain parameters, or groups of either. A module or names make the plan and
            checkpoints readable.
        budget: A budget in any spelling of the command line: "8gb", "state_25", "auto".
        probe: Runs one forward and backward pass on a typical batch, or returns its loss, so that limits on memory and
            time are planned before training. Without it the first step runs on the plan of least state and measures its
            memory, outside of the cap; a limit on time needs it.
        settings: Planner, reallocation and optimizer settings. The default warm-up is 100 steps.
        recipe: A recipe by name or file, or a `Recipe`: what each role runs, in place of the planner's choice.
        release: Step each block in the backward pass and drop its gradients, see BlockwiseOptimizer. None takes
            the value in `settings`.

    Raises:
        BadInputError: An argument is not supported.
        InfeasibleBudgetError: No allocation meets the budget; without a probe the first `step()` may raise it.
    """

    @in_own_words
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
        release: bool | GradientRelease | None = None,
        recipe: RecipeLike | None = None,
    ):
        settings = settings or SessionSettings(reallocation=ReallocationSettings(warmup_steps=PLAIN_WARMUP_STEPS))
        settings = with_recipe(settings, recipe=recipe)
        if release is not None:
            settings = replace(settings, release=release)
        group = ranks()
        if group is ALONE:
            refuse_ranks("optimizer")
        params = unwrapped(params)
        module = params if isinstance(params, nn.Module) else None
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_settings({key: plain(value) for key, value in options.items()})
        named, groups = name_parameters(params)
        pairs = [pair for group in groups for pair in group["params"]]
        device = next((p.device for p in named.values()), torch.device("cpu"))
        take_from_others([param for _, param in pairs])  # whose hooks would step in the probe
        group.share([param for _, param in pairs])  # states are made of them, of some their last bits
        free = -int(group.most(-free_bytes(device))[0])
        limit = resolve_auto(parse_budget(budget), free_bytes=free)
        if limit.step_time is not None and probe is None:
            raise BadInputError(
                f"budget.step_time={limit.step_time:g} needs seconds of a step before training: give probe=, a "
                "callable that runs one forward and backward, or leave step_time out"
            )
        unknown = limit.memory_bytes is not None and probe is None
        in_bf16 = all(param.dtype == torch.bfloat16 for param in named.values())
        settings = widened(settings, device=device.type, budget=limit, precision="bf16-true" if in_bf16 else "32-true")
        session = Session(
            describe(module if module is not None else pairs, optimizer_groups=groups),
            params=named,
            budget=limit,
            settings=settings,
            betas=betas,
            device=device,
            declared=declared_blocks(module, declaring(module)) if module is not None else None,
            module=module,
            ranks=group,
        )
        first_cap = ExitStack()  # the first step is a look: what passes the budget is refused by number after it
        if unknown:
            settle_allocator(device)
            first_cap.enter_context(uncapped(device, budget=limit))
        else:
            cap_device(device, budget=limit)
        try:
            if probe is None:
                session.assume()
            else:
                source = module if module is not None else [param for _, param in pairs]
                measure_narrow(session, CallerProbe(probe, source=source, averaged=group is not ALONE))
            arrives = needs_room(session.plan, footprint=session.planner.footprint)
            if arrives:
                leave(session.narrow)
            super().__init__(groups, **session.arguments(), device=device if arrives else None, **options)
            if module is not None:
                watch_loads(module, self)
        except BaseException:
            first_cap.close()
            raise
        self.reallocator = session.reallocator(weakref.proxy(self))
        self._settings = settings
        self._first_step: FirstStepMemory | None = None
        self._session: Session | None = None  # and the cap that comes after it, until the first step is measured
        self._first_cap: ExitStack | None = None
        if unknown:
            self._session, self._first_cap = session, first_cap
            self._measure_first_step(list(named.values()), device=device)
            weakref.finalize(self, first_cap.close).atexit = False
        self.reallocator.attach()

    def _measure_first_step(self, params: Sequence[Tensor], *, device: torch.device) -> None:
        self._first_step = FirstStepMemory(params, context_bytes=context_bytes(device))
        # If no step ever comes, measuring ends with the optimizer, to which nothing of its own refers but weakly.
        weakref.finalize(self, self._first_step.stop)
        if self.releaser is not None:
            self.releaser.before_block = self._first_step.note_block
        self.register_step_post_hook(_learn_footprint)

    @property
    def plan(self) -> Plan:
        return self.reallocator.plan

    @in_own_words
    def _learn_footprint(self) -> None:
        """After the very first step: the memory of its forward and backward is known, so the budget can be planned."""
        if self._first_step is None:
            return
        assert self._session is not None and self._first_cap is not None
        session, first_cap, first_step = self._session, self._first_cap, self._first_step
        self._session = self._first_cap = self._first_step = None
        planner, profiler = self.reallocator.planner, self.reallocator.profiler
        planner.footprint = session.largest(session.complete(first_step.finish(state_bytes=self.state_bytes())))
        if profiler is not None:
            planner.count_profile(profiler.nbytes, temporary_bytes=profiler.temporary_bytes())
        if self.releaser is not None:
            self.releaser.before_block = None
        planner.budget = session.budget
        with first_cap:
            self.reallocator.replan(why="the first step told what forward and backward need")

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The blockwise state, and under `online` what the reallocator needs to go on."""
        return {**super().state_dict(), "online": self.reallocator.state_dict()}

    def _resume(self, state_dict: dict[str, Any]) -> None:
        """Takes over the saved allocation where it meets the budget; the states follow, converted where they differ."""
        online = state_dict.get("online")
        if online is None:
            return
        self._check_online(online)
        self.reallocator.load_state_dict(online)

    def _check_online(self, online: Any) -> None:
        """Raises, with nothing changed, what the reallocator would raise halfway through."""
        keys = ("step", "last_decision", "num_accepted", "risk_model", "profile", "choices", "gap", "profiler")
        absent = [key for key in keys if not isinstance(online, Mapping) or key not in online]
        if absent:
            raise CheckpointError(
                f"'online' of the optimizer checkpoint lacks {', '.join(absent)}: use another checkpoint, or leave "
                "'online' out to load the states alone"
            )
        profile = profile_from_plain(online["profile"]) if online["profile"] else None
        planner, profiler = self.reallocator.planner, self.reallocator.profiler
        planner.adopt(online["choices"], risk=online["risk_model"], profile=profile, gap=online["gap"])
        if profiler is not None and online["profiler"]:
            before = profiler.state_dict()
            try:
                profiler.load_state_dict(online["profiler"])
            except BaseException:
                if before:
                    profiler.load_state_dict(before)
                raise

    # -- copies, made together with the model: its parameters are then the copy's -----------------------------------

    def __copy__(self) -> "BaocOptimizer":
        raise TypeError("a shallow copy of a BaocOptimizer would reallocate its states twice: use copy.deepcopy")

    def __getstate__(self) -> dict[str, Any]:
        if self._first_step is not None:
            raise TypeError(
                "this BaocOptimizer measures the memory of its first step, so it cannot be copied or pickled before "
                "that: take a step first, or build it with probe="
            )
        profiler = self.reallocator.profiler
        return {**super().__getstate__(), "_profiled": profiler.state_dict() if profiler is not None else {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        profiled = state.pop("_profiled")
        super().__setstate__(state)
        planner = self.reallocator.planner
        planned = {param.name for block in planner.blocks for param in block.params}
        named = {name: param for param, name in self.roster.names.items() if name in planned}
        profiler = make_profiler(planner, named, settings=self._settings, betas=self.defaults["betas"])
        if profiler is not None and profiled:
            profiler.load_state_dict(profiled)
        elif profiler is not None:
            profiler.release()
        self.reallocator.profiler = profiler
        self.reallocator.optimizer = weakref.proxy(self)
        self.reallocator.attach()


def _learn_footprint(optimizer: Any, *_: object) -> None:
    optimizer._learn_footprint()


def measure_narrow(session: Session, probe: CallerProbe) -> None:
    """Measures and plans, and looks again with the weights that the plan keeps in 16 bits: layers take these under bf16
    autocast only, which is the caller's. Raises BadInputError where the probe is without it."""
    try:
        session.measure(probe)
        if any(SPECS[base].weights != "native" for base in map(on_device, session.plan.allocation.choices.values())):
            with cast_to_bf16(session.narrow, module=session.module):
                probe.footprint(context_bytes=session.context_bytes, released=session.released)
    except RuntimeError as error:
        if not session.narrow or "dtype" not in str(error):
            raise
        low = [spec for spec, row in select(session.settings.planner.specs).items() if row.weights != "native"]
        raise BadInputError(
            f"the catalogue has specs with bf16 weights ({', '.join(low[:3])}, ...), but the probe's layers get inputs "
            f"of another type ({str(error).splitlines()[0]}): run forward under torch.autocast(..., "
            "dtype=torch.bfloat16), in the probe and in the loop, or leave these specs out"
        ) from error


def name_parameters(params: Any) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Any spelling of parameters -> trainable ones by name, and groups of (name, parameter) pairs, frozen ones too.

    Plain parameters are named `param0`, `param1`, ... in order. Raises BadInputError where nothing is trainable, and
    where two are called the same.
    """
    groups = [dict(group) for group in raw_groups(params)]
    entries: list[tuple[int, str, Tensor]] = []
    for index, group in enumerate(groups):
        first = len(entries)
        for given, param in members_of(group, index=index):
            name = f"param{len(entries)}" if given is None else given
            check_tensor(param, name=name)
            entries.append((index, name, param))
        group.pop("param_names", None)
        group["params"] = [(name, param) for _, name, param in entries[first:]]
    check_names(entries)
    named = {name: param for _, name, param in entries if param.requires_grad}
    if not named:
        raise BadInputError("no trainable parameter was given: pass a module, model.parameters() or parameter groups")
    return named, groups
