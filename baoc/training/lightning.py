"""The Lightning strategy: it plans inside a budget and replaces the user's AdamW by a BlockwiseOptimizer.

Lightning calls `setup_optimizers` when the module is on its device and the data are attached; all planning happens
there. Later decisions hook into the optimizer's own step, so the user adds no callback.
"""

import gc
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from baoc.core.budgets import AUTO, PRESETS, parse_budget, resolve_auto
from baoc.errors import BadInputError, CheckpointError, TrainingFailedError
from baoc.optim import BlockwiseOptimizer
from baoc.optim.backward import detach_other_releases
from baoc.optim.shards import is_sharded, warm_up_communicator
from baoc.optim.wrappers import watch_loads
from baoc.parallel import (
    SINGLE_PROCESS,
    Ranks,
    check_equal_on_ranks,
    check_same_on_ranks,
    ranks,
    refuse_several_processes,
)
from baoc.planning.planner import Planner
from baoc.profiling import cap_device, context_bytes, describe, free_bytes
from baoc.profiling.tracker import PeakMeter
from baoc.tracking.checkpoints import check_shard_metadata
from baoc.training.arriving_weights import (
    MIXED,
    ArrivedWeights,
    WeightsBetweenFits,
    move_to_host,
    must_wait,
    needs_room,
    no_room,
    on_device_as_bf16,
)
from baoc.training.gradient_release import leave_clipping, leaves_gradients, released_clipping, take_clipping_back
from baoc.training.measure.first_step import FirstStep
from baoc.training.measure.probe import Probe, UnmeasuredStepError
from baoc.training.narration import Narrator, loggers_of
from baoc.training.own_words import in_own_words
from baoc.training.reallocator import Reallocator
from baoc.training.session import (
    RecipeLike,
    Resharding,
    Session,
    SessionSettings,
    bf16_weight_specs,
    largest_shards,
    refuse_sharded,
    with_recipe,
    without_scratch_measurements,
)
from baoc.training.user_optimizer import (
    averaging_callbacks,
    check_arguments,
    count_steps_for_schedulers,
    hyperparameters,
    named_groups,
    rebind_schedulers,
    shared_by_ranks,
    widened,
    without_bf16,
)
from baoc.types import Budget, Footprint, LatencyTable, Plan, Profile, Reallocation

log = logging.getLogger(__name__)
STRATEGY_NAME, DDP_STRATEGY_NAME = "baoc", "baoc_ddp"
PlanListener = Callable[[Planner, Plan], None]
TRAINER_SETTINGS = (  # by which ranks would part
    *("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "max_steps", "max_epochs"),
    *("limit_train_batches", "limit_val_batches", "val_check_interval", "check_val_every_n_epoch", "precision"),
)
PRIME = 2_147_483_647  # of `checksum`


class _GradientGuard(L.Callback):
    """Masks non-finite gradient elements after unscaling and before Lightning clips, so the norm never sees them. Under
    a GradScaler nothing is masked: an overflow there means that the whole step is skipped."""

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if getattr(trainer.precision_plugin, "scaler", None) is None and isinstance(optimizer, BlockwiseOptimizer):
            optimizer.mask_nonfinite()


class BudgetedStrategy(Strategy):
    """Base of the strategies of one device and of several, see BaocStrategy.

    Attributes:
        ranks: The ranks that train together, from `setup_environment` on.
        reallocators: One for each optimizer; `reallocator` is the first.
        known_footprint: A footprint by which the micro-batch search found that this very step fits.
        plan_listeners: Called with the planner and the first plan.
        resume_listeners: Called with step and plan after states were loaded.
    """

    display_name = "BaocStrategy"
    keeps_gradients = False  # between steps

    def __init__(
        self,
        budget: str | int | float | Mapping[str, Any] | Budget = "auto",
        *,
        settings: SessionSettings | None = None,
        recipe: RecipeLike | None = None,
        checkpointing: bool | int | Literal["auto"] | None = None,
        pretrained: bool | None = None,
        latency: LatencyTable | None = None,
        plan_only: bool = False,
        record_latency: bool = False,
        verbose: bool = True,
        plan_listeners: Iterable[PlanListener] = (),
        reallocation_listeners: Iterable[Callable[[Reallocation, Plan, Profile | None], None]] = (),
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.ranks: Ranks = SINGLE_PROCESS
        self.budget = parse_budget(budget)
        settings = SessionSettings() if settings is None else settings
        self.settings = with_recipe(settings, recipe=recipe, checkpointing=checkpointing)
        self._pretrained = pretrained
        self.latency = latency
        self.known_footprint: Footprint | None = None
        self.plan_only = plan_only
        self.record_latency = record_latency
        self.verbose = verbose
        self.plan_listeners = list(plan_listeners)
        self.reallocation_listeners = list(reallocation_listeners)
        self.resume_listeners: list[Callable[[int, Plan], None]] = []
        self.reallocators: list[Reallocator] = []
        self.reallocator: Reallocator | None = None
        self.narrators: list[Narrator] = []
        self.context_bytes = 0
        self.layers_summary = ""  # see Session
        self._resharding: Resharding | None = None  # see Session
        self._first_step_meter: PeakMeter | None = None
        self._unmeasured_step: FirstStep | None = None  # a first step that could not be measured before training
        self._weights_on_host = False  # as native weights exceed the budget
        self._weights_between_fits = WeightsBetweenFits()
        self._arrived_weights: ArrivedWeights | None = None  # of a resume, until the optimizer's states are loaded
        self._nonfinite_guard = _GradientGuard()
        self._in_last_backward = False  # of a step

    # -- set-up ---------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Sets the budget's cap before anything is on the device."""
        free = free_bytes(self.root_device)
        super().setup_environment()
        self._join_ranks()
        self.budget = resolve_auto(self.budget, free_bytes=-int(self.ranks.all_reduce_max(-free)[0]))
        self.context_bytes = int(self.ranks.all_reduce_max(context_bytes(self.root_device))[0])
        cap_device(self.root_device, budget=self.budget)

    def _join_ranks(self) -> None:
        """Sets `ranks`."""

    @property
    def _module(self) -> L.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def evaluator(self) -> SingleDeviceStrategy:
        """A strategy for a Trainer that evaluates the module in this process after a fit."""
        return SingleDeviceStrategy(self.root_device)

    def model_to_device(self) -> None:
        """Moves the module to the device, unless native weights exceed the budget: then they wait in CPU memory for a
        plan. A pass without training makes weights bf16 if that loses nothing, and raises InfeasibleBudgetError if it
        is not enough."""
        module = self._module
        fits = module.trainer.state.fn == TrainerFn.FITTING
        if fits:
            self._weights_between_fits.begin_fit(module)
        exceeds = partial(
            must_wait, module, device=self.root_device, budget=self.budget, context_bytes=self.context_bytes
        )
        self._weights_on_host = exceeds()
        if not self._weights_on_host:
            super().model_to_device()
            return
        if fits:
            return  # `setup_optimizers` moves them
        if module.trainer.precision in MIXED:
            self._weights_between_fits.narrow(module)
        if exceeds():
            self._weights_between_fits.widen()
            raise no_room(module, budget=self.budget, context_bytes=self.context_bytes)
        super().model_to_device()

    @in_own_words
    def setup_optimizers(self, trainer: L.Trainer) -> None:
        """Plans, and replaces the user's optimizers by BlockwiseOptimizers; groups and schedulers stay."""
        module = self._module
        self._refuse_unsupported(trainer)
        if averaging := averaging_callbacks(trainer):
            self.settings = without_bf16(self.settings, because=averaging)
        else:
            self.settings = widened(
                self.settings, device=self.root_device.type, budget=self.budget, precision=str(trainer.precision)
            )
        self._refuse_mixed_types(trainer)
        detach_other_releases(list(module.parameters()))  # their hooks would step in the probe
        super().setup_optimizers(trainer)
        optimizers = self._users_optimizers(module)
        self.settings = without_scratch_measurements(self.settings, network=module, pretrained=self._pretrained)
        settings = replace(self.settings, release=released_clipping(trainer, self.settings.release))
        if module.automatic_optimization:
            self.reallocators = [self._plan_automatic(trainer, optimizers[0], settings=settings)]
        else:
            self.reallocators = self._plan_manual(module, optimizers, settings=settings)
        self.reallocator = reallocator = self.reallocators[0]
        for replaced, one in zip(optimizers, self.reallocators, strict=True):
            one.siblings = [other for other in self.reallocators if other is not one]
            one.listeners.extend(self.reallocation_listeners)
            rebind_schedulers([c.scheduler for c in self.lr_scheduler_configs], old=replaced, new=one.optimizer)
            if self.lr_scheduler_configs:
                count_steps_for_schedulers(one.optimizer)
            watch_loads(module, one.optimizer.registry)
        self.optimizers = [one.optimizer for one in self.reallocators]
        if reallocator.optimizer.releaser is not None:
            leave_clipping(self.precision_plugin)
        callbacks: list[L.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        if self._nonfinite_guard not in callbacks:
            callbacks.insert(0, self._nonfinite_guard)
        several = len(optimizers) > 1
        self.narrators = [
            Narrator(
                one,
                name=f"{self.display_name}, optimizer {number}" if several else self.display_name,
                verbose=self.verbose,
                device=self.root_device,
                log=loggers_of(trainer, prefix=f"optimizer_{number}/" if several else ""),
            )
            for number, one in enumerate(self.reallocators, start=1)
        ]
        unstepped = set(self.reallocators)
        for one, narrator in zip(self.reallocators, self.narrators, strict=True):
            narrator.layers_summary = self.layers_summary
            if self._unmeasured_step is not None:
                one.optimizer.after_step.append(partial(self._finish_unmeasured_step, one, unstepped=unstepped))
            else:
                narrator.begin()
        for listener in self.plan_listeners:
            listener(reallocator.planner, reallocator.plan)
        if self.plan_only:
            trainer.limit_train_batches = 0  # Lightning then leaves `fit` before the first batch

    def _plan_automatic(self, trainer: L.Trainer, optimizer: Optimizer, *, settings: SessionSettings) -> Reallocator:
        """Measures a step, plans, and builds the optimizer; the module is on its device afterwards."""
        module = self._module
        named = dict(module.named_parameters())
        check_same_on_ranks(shared_by_ranks(groups=optimizer.param_groups), among=self.ranks)
        probe = self.ranks.run_or_raise_on_all(lambda: Probe(trainer, self))
        refuse_sharded(named, budget=self.budget, settings=settings)
        session = self._session(optimizer, params=named, settings=settings)
        session.resharding = self._resharding
        unsharded = [tensor for tensor in (*named.values(), *module.buffers()) if not is_sharded(tensor)]
        self.ranks.broadcast_tensors(unsharded)  # states start from them, and some hold their last bits
        with ExitStack() as stack:
            if self._weights_on_host:
                stack.enter_context(
                    on_device_as_bf16(
                        module,
                        bf16_params=session.bf16_params,
                        device=self.root_device,
                        budget=self.budget,
                        context_bytes=self.context_bytes,
                    )
                )
            try:
                session.measure(
                    probe,
                    latency=self.latency,
                    record_latency=self.record_latency,
                    host_steps_overlap_backward=settings.overlap and leaves_gradients(trainer),
                    weights_on_host=self._weights_on_host,
                    known_footprint=self.known_footprint,
                )
            except UnmeasuredStepError as error:
                self._plan_unmeasured(session, why=str(error))
            self.context_bytes, self.layers_summary = session.context_bytes, session.layers_summary
            stack.close()
            device = self.root_device if self._weights_on_host else None
            if device is None and needs_room(session.plan, footprint=session.planner.footprint):
                move_to_host(session.bf16_params)
                device = self.root_device
            if trainer._checkpoint_connector._loaded_checkpoint:
                self._arrived_weights = ArrivedWeights(session)
            reallocator = session.start(
                named_groups(optimizer, module), defaults=hyperparameters(optimizer), device=device
            )
            if self._arrived_weights is not None:
                self._arrived_weights.note_versions()
        if self._unmeasured_step is not None:
            self._unmeasured_step.begin(reallocator, owner=reallocator.optimizer)
        return reallocator

    def _session(
        self, optimizer: Optimizer, *, params: Mapping[str, torch.nn.Parameter], settings: SessionSettings
    ) -> Session:
        module = self._module
        return Session(
            largest_shards(describe(module, optimizer_groups=optimizer.param_groups), params=params),
            params=params,
            budget=self.budget,
            settings=settings,
            betas=tuple(hyperparameters(optimizer)["betas"]),
            device=self.root_device,
            module=module,
            ranks=self.ranks,
        )

    def _plan_unmeasured(self, session: Session, *, why: str) -> None:
        """Plans without a measurement, for `why`; a memory budget is planned for after the first real step."""
        if self._weights_on_host or self.budget.step_time is not None:
            needs = (
                "a budget below the weights in full"
                if self._weights_on_host
                else f"step_time={self.budget.step_time:g}"
            )
            raise BadInputError(
                f"a step could not be measured before training ({why}), which {needs} needs: make what it needs in "
                "__init__ or setup of the LightningModule, or give another budget"
            )
        limited = self.budget.memory_bytes is not None
        then = "its first real step is measured instead" if limited else "no limit needs it"
        log.warning("a step could not be measured before training (%s): %s", why, then)
        if limited:
            self._unmeasured_step = FirstStep(session)
        session.assume()

    def _plan_manual(
        self, module: L.LightningModule, optimizers: Sequence[Optimizer], *, settings: SessionSettings
    ) -> list[Reallocator]:
        """Plans and builds the optimizers of a module that steps them itself, whose step cannot run before training. A
        state budget is the same share of each; a memory budget is planned for after all have stepped once."""
        step_time, released = self.budget.step_time, settings.release is not False
        if step_time is not None or released or self._weights_on_host:
            limit = "a budget below the weights in full" if step_time is None else f"budget.step_time={step_time:g}"
            raise BadInputError(
                f"the module sets automatic_optimization=False, and {'gradient release' if released else limit} needs "
                "a step that Lightning runs: use a "
                "budget of memory or state without it, or automatic optimization"
            )
        named = dict(module.named_parameters())
        names = {id(param): name for name, param in named.items()}
        sessions: list[Session] = []
        for optimizer in optimizers:
            own = {names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names}
            params = {name: param for name, param in named.items() if name in own}
            sessions.append(self._session(optimizer, params=params, settings=settings))
        if self.budget.memory_bytes is not None:
            self._unmeasured_step = FirstStep(*sessions)
        for session in sessions:
            session.assume()
        reallocators = [
            session.start(named_groups(optimizer, module), defaults=hyperparameters(optimizer))
            for session, optimizer in zip(sessions, optimizers, strict=True)
        ]
        if self._unmeasured_step is not None:
            self._unmeasured_step.begin(*reallocators, owner=reallocators[0].optimizer)
        return reallocators

    def _users_optimizers(self, module: L.LightningModule) -> list[Optimizer]:
        if not self.optimizers or (module.automatic_optimization and len(self.optimizers) != 1):
            raise BadInputError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers: BAOC trains with one in automatic "
                "optimization. Put all parameters into one AdamW with parameter groups, or step several yourself "
                "(automatic_optimization=False), each of which gets its share of the budget"
            )
        return self.optimizers

    def _refuse_unsupported(self, trainer: L.Trainer) -> None:
        """Raises BadInputError for a Trainer or a module that this strategy does not train."""

    def teardown(self) -> None:
        """Ends a fit: weights and states leave the device, and later backward passes step nothing. Backends, which
        refer to both, go first: a validation that follows needs the room."""
        self._end_first_step()
        if self._unmeasured_step is not None:
            self._unmeasured_step.close()
            self._unmeasured_step = None
        for optimizer in (reallocator.optimizer for reallocator in self.reallocators):
            optimizer.registry.refresh(optimizer.param_groups)
            self._weights_between_fits.end_fit(optimizer)
        super().teardown()
        self._weights_between_fits.widen()
        if self.reallocator is not None and self.reallocator.optimizer.releaser is not None:
            self.reallocator.optimizer.releaser.detach()
            take_clipping_back(self.precision_plugin)

    def _refuse_mixed_types(self, trainer: L.Trainer) -> None:
        """Raises BadInputError for specs with bf16 weights without bf16 autocast or a bf16 model."""
        specs = [spec.name for spec in bf16_weight_specs(self.settings.planner)]
        if specs and trainer.precision not in ("bf16-mixed", "bf16-true"):
            more = ", ..." if len(specs) > 3 else ""
            raise BadInputError(
                f"the catalogue has specs with bf16 weights ({', '.join(specs[:3])}{more}), but trainer.precision is "
                f"{trainer.precision}: layers would get inputs of another type. Set trainer.precision=bf16-mixed, or "
                "leave these specs out"
            )

    # -- reporting ------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before a fit."""
        return self.reallocator.plan if self.reallocator is not None else None

    @property
    def budget_met(self) -> bool | None:
        """True if the limit on memory or state holds so far; None without such a limit, or if no peak is known.

        On a CPU a peak is known of the first step only, whatever later batches hold.
        """
        verdicts = [narrator.budget_met for narrator in self.narrators]
        return None if None in verdicts or not verdicts else all(verdicts)

    def summary(self) -> str:
        """The plan in force as a table by role and spec, with totals, and state and peak beside the budget."""
        summaries = [narrator.summary() for narrator in self.narrators]
        return "\n\n".join(summaries) or f"{self.display_name}: no plan before a fit"

    def on_train_start(self) -> None:
        """Starts to measure the peak of the first step on a CPU. CUDA has a peak at the end."""
        module = self.lightning_module
        measured = (
            self._unmeasured_step is not None or self.root_device.type != "cpu" or self.budget.memory_bytes is None
        )
        if module is None or measured or not self.verbose:
            return
        self._first_step_meter = PeakMeter(
            self.root_device, [module, [optimizer.state for optimizer in self.optimizers]]
        )
        self._first_step_meter.__enter__()

    @in_own_words
    def _finish_unmeasured_step(self, stepped: Reallocator, *, unstepped: set[Reallocator]) -> None:
        """After the first real step of an optimizer. When all have stepped, plans by what the step was seen to take."""
        if not stepped.has_gradients:
            return
        unstepped.discard(stepped)
        if self._unmeasured_step is not None and not unstepped:
            first_step, self._unmeasured_step = self._unmeasured_step, None
            first_step.learn(*self.reallocators)
            for narrator in self.narrators:
                narrator.first_step_bytes = first_step.peak_bytes

    def _end_first_step(self) -> None:
        if self._first_step_meter is not None:
            meter, self._first_step_meter = self._first_step_meter, None
            meter.exit_out_of_order()
            for narrator in self.narrators:
                narrator.first_step_bytes = meter.peak_bytes

    def on_train_end(self) -> None:
        for narrator in self.narrators:
            narrator.gather_peaks()
            narrator.conclude()

    # -- training -------------------------------------------------------------------------------------------------

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Lightning's step, whose closure runs the last backward."""
        self._in_last_backward = True
        try:
            return super().optimizer_step(optimizer, *args, **kwargs)
        finally:
            self._in_last_backward = False
            self._end_first_step()

    def backward(self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Any:
        """Steps host-placed blocks in the last backward of a step, if their gradients are final then."""
        module = self.lightning_module
        overlaps = self._in_last_backward and self.settings.overlap
        final = overlaps and module is not None and leaves_gradients(module.trainer)
        if final and isinstance(optimizer, BlockwiseOptimizer):
            with optimizer.last_backward():
                return super().backward(closure_loss, optimizer, *args, **kwargs)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a file, or a folder of shards that Lightning's ModelParallelStrategy wrote."""
        if not Path(checkpoint_path).is_dir():
            return super().load_checkpoint(checkpoint_path, weights_only)
        if weights_only is not False:
            check_shard_metadata(Path(checkpoint_path))
        content: dict[str, Any] = _load_distributed_checkpoint(Path(checkpoint_path))
        parts = sorted((key for key in content if key.startswith("optimizer_")), key=lambda key: (len(key), key))
        return {"optimizer_states": [content.pop(key) for key in parts], **content}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state, with the reallocator's under `online`: plan, profile, counters."""
        state: dict[str, Any] = dict(super().optimizer_state(optimizer))
        for reallocator in self.reallocators:
            if reallocator.optimizer is getattr(optimizer, "_optimizer", optimizer):
                state["online"] = reallocator.state_dict(copies=False)  # written at once
        return state

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Adopts the saved allocation if it meets the budget, then loads the states, converted where specs differ."""
        saved: Sequence[Mapping[str, Any]] = checkpoint["optimizer_states"]
        if len(saved) != len(self.reallocators):
            raise CheckpointError(
                f"the checkpoint has states of {len(saved)} optimizers, and the module makes {len(self.reallocators)}: "
                "resume with the module of that run"
            )
        arrived, self._arrived_weights = self._arrived_weights, None
        native = arrived.untouched() if arrived is not None else {}
        for reallocator, narrator, state in zip(self.reallocators, self.narrators, saved, strict=True):
            self._load_states(dict(state), reallocator=reallocator, narrator=narrator, native=native)

    def _load_states(
        self, state: dict[str, Any], *, reallocator: Reallocator, narrator: Narrator, native: Mapping[str, torch.Tensor]
    ) -> None:
        """`native`: weights of the checkpoint, by name, before the plan in force rounded them to bf16."""
        online = state.pop("online", None)
        blocks = state.get("blocks")
        notes = reallocator.load_state_dict(online, blocks=blocks) if online is not None else []
        optimizer = reallocator.optimizer
        optimizer.load_state_dict(state)
        assert optimizer.load_report is not None
        optimizer.load_weights({name: native[name] for name in optimizer.load_report.whole_names if name in native})
        if online is not None:
            narrator.resumed()
            for listener in self.resume_listeners:
                listener(reallocator.step, reallocator.plan)
            reallocator.report_resume(optimizer.load_report.moves, notes=notes)


class BaocStrategy(BudgetedStrategy, SingleDeviceStrategy):
    """Trains any LightningModule inside a budget: `L.Trainer(strategy=BaocStrategy(budget="8gb"))`.

    Loader and schedulers stay as they are. The module returns one `torch.optim.AdamW`, or several that it steps itself
    (`automatic_optimization=False`), which share the budget.
    `plan_listeners` are called with the first plan, `reallocation_listeners` with each later decision.

    Args:
        budget: A budget in any spelling of the command line: "8gb", "state_25", {"step_time": 1.2}, "auto".
        device: "auto" (the Trainer's accelerator), "cpu", "cuda" or "cuda:N".
        settings: Planner, reallocation and optimizer settings.
        recipe: A recipe by name or file, or a `Recipe`: what each role runs, in place of the planner's choice.
        checkpointing: How many layers recompute their activations in backward: True, False, the number of the first
            ones, or "auto" for the fewest with which the plan is as good as with all. None leaves the module as it is.
        pretrained: Whether weights are pretrained, or adapters; see BaocOptimizer.
        latency: Optimizer step times measured before; None measures them where a step-time limit needs them.
        plan_only: `fit` plans and ends before training.
        record_latency: Measure the step times of the chosen specs even if no limit needs them.
        verbose: Print the plan, each move, and at the end whether the budget held; the Trainer's loggers get the same.

    Raises:
        InfeasibleBudgetError: By `Trainer.fit`, before the first step; and BadInputError for what is not supported.
    """

    strategy_name = STRATEGY_NAME

    def __init__(  # names what `super` takes, as editors and LightningCLI show a signature
        self,
        budget: str | int | float | Mapping[str, Any] | Budget = "auto",
        *,
        device: str = "auto",
        settings: SessionSettings | None = None,
        recipe: RecipeLike | None = None,
        checkpointing: bool | int | Literal["auto"] | None = None,
        pretrained: bool | None = None,
        latency: LatencyTable | None = None,
        plan_only: bool = False,
        record_latency: bool = False,
        verbose: bool = True,
        **others: Any,
    ):
        refuse_several_processes("strategy")
        check_arguments(
            others, BaocStrategy, BudgetedStrategy, also=("accelerator", "checkpoint_io", "precision_plugin")
        )
        if device not in ("auto", "cpu", "cuda") and not device.startswith("cuda:"):
            raise BadInputError(f"device={device!r} is not supported: use auto, cpu, cuda or cuda:N; MPS is not tested")
        named = {"auto": "cpu", "cuda": "cuda:0"}  # auto is settled in setup_environment; Lightning wants an index
        super().__init__(
            budget,
            device=named.get(device, device),
            settings=settings,
            recipe=recipe,
            checkpointing=checkpointing,
            pretrained=pretrained,
            latency=latency,
            plan_only=plan_only,
            record_latency=record_latency,
            verbose=verbose,
            **others,
        )
        self._device_choice = device

    def setup_environment(self) -> None:
        """Chooses the device if it is "auto", now that Lightning has resolved its accelerator."""
        refuse_several_processes("strategy")  # of a process group that was made since
        if self._device_choice == "auto" and isinstance(self.accelerator, CUDAAccelerator):
            self._root_device = torch.device("cuda", torch.cuda.current_device())
        super().setup_environment()

    def _refuse_unsupported(self, trainer: L.Trainer) -> None:
        devices = trainer._accelerator_connector._devices_flag
        several = (isinstance(devices, int) and devices > 1) or (isinstance(devices, list) and len(devices) > 1)
        if several or trainer.num_nodes > 1:
            raise BadInputError(
                f"Trainer(devices={devices}, num_nodes={trainer.num_nodes}): BaocStrategy trains on one device. Use "
                "BaocDDPStrategy, which takes the same arguments, or set devices=1 and num_nodes=1"
            )


def refuse_uneven_end(trainer: L.Trainer, *, batch_idx: int, among: Ranks) -> None:
    """Raises TrainingFailedError on all ranks if this batch is the last on some of them alone, for which the others
    would wait in their next step. Asks only where data have no length, as `on_train_start` compares lengths."""
    fetcher, count = trainer.fit_loop._data_fetcher, batch_idx + 1
    is_step = count % trainer.accumulate_grad_batches == 0
    all_end = count >= trainer.num_training_batches or 0 <= trainer.max_steps <= trainer.global_step + is_step
    if fetcher is None or fetcher.length is not None or all_end:
        return
    ended = [rank for rank, done in enumerate(among.all_gather_number(float(fetcher.done))) if done]
    if 0 < len(ended) < among.size:
        raise TrainingFailedError(
            f"the training data of rank {', '.join(map(str, ended))} ended with batch {count} of the epoch, and other "
            f"ranks have more, which would wait for it: give all ranks as many batches, or set limit_train_batches to "
            f"at most {count}"
        )


class RanksStrategy(BudgetedStrategy):
    def __init__(self, budget: str | int | float | Mapping[str, Any] | Budget = "auto", **settings: Any):
        super().__init__(budget, **settings)
        self.settings = replace(self.settings, overlap=False)

    def _join_ranks(self) -> None:
        self.ranks = ranks()
        warm_up_communicator(self.root_device)

    def setup(self, trainer: L.Trainer) -> None:
        given = shared_by_ranks(
            params=dict(self._module.named_parameters()),
            settings=self.settings,
            budget=self.budget,
            pretrained=self._pretrained,
            latency="missing" if self.latency is None else "given",
            plan_only=self.plan_only,
            record_latency=self.record_latency,
            trainer={name: getattr(trainer, name) for name in TRAINER_SETTINGS},
        )
        check_same_on_ranks(given, among=self.ranks)
        super().setup(trainer)

    def on_train_start(self) -> None:
        """Raises BadInputError if ranks have other numbers of batches to train on, and would wait for each other."""
        trainer = self._module.trainer
        most = trainer.max_steps * trainer.accumulate_grad_batches if trainer.max_steps >= 0 else math.inf
        given: dict[str, object] = {"the number of training batches": min(trainer.num_training_batches, most)}
        if any(map(is_sharded, self._module.parameters())):  # whose forward is one of all ranks
            given["the number of validation batches"] = trainer.num_val_batches
        check_same_on_ranks(given, among=self.ranks)
        super().on_train_start()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        refuse_uneven_end(self._module.trainer, batch_idx=batch_idx, among=self.ranks)

    def _refuse_unsupported(self, trainer: L.Trainer) -> None:
        if not trainer.lightning_module.automatic_optimization:
            raise BadInputError(
                f"the module sets automatic_optimization=False: {self.display_name} trains one AdamW in automatic "
                "optimization. Use that, or BaocStrategy in one process"
            )


class BaocDDPStrategy(RanksStrategy, DDPStrategy):
    """BaocStrategy for several processes: `L.Trainer(devices=2, strategy=BaocDDPStrategy(budget="8gb"))`.

    The budget is that of each device. Ranks measure a step together; rank 0 plans by the measurement of the rank that
    needs most, and decides again from its profile of the averaged gradients. All ranks migrate at once, so weights and
    states stay equal, bit for bit. The plan comes before DistributedDataParallel, as it may change the type of weights.
    Gradients are views of DDP's buckets, which are allocated, and counted, all the time.

    `budget` and the named arguments are BaocStrategy's, without `device`; others are those of Lightning's DDPStrategy
    and of DistributedDataParallel. Gradient release, and stepping host-placed blocks in backward, are not supported.
    """

    strategy_name = DDP_STRATEGY_NAME
    display_name = "BaocDDPStrategy"
    keeps_gradients = True  # in buckets

    def __init__(
        self,
        budget: str | int | float | Mapping[str, Any] | Budget = "auto",
        *,
        gradient_as_bucket_view: bool = True,
        **settings: Any,
    ):
        check_arguments(settings, BaocDDPStrategy, BudgetedStrategy, DDPStrategy, DistributedDataParallel)
        super().__init__(budget, gradient_as_bucket_view=gradient_as_bucket_view, **settings)
        self._first_since_wrapped = False

    def configure_ddp(self) -> None:
        """Does nothing, as Lightning calls this before there is a plan, which may change weights."""

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        super().setup_optimizers(trainer)
        assert self.reallocator is not None
        self.reallocator.around_migration = self._rewrap_around_migration
        self._wrap()
        if self._arrived_weights is not None:
            self._arrived_weights.note_versions()  # again: DistributedDataParallel wrote them, unchanged

    def _wrap(self) -> None:
        super().configure_ddp()
        self._first_since_wrapped = True

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        """Builds DistributedDataParallel on the stream that trains. On Lightning's own the first bucket, of all
        gradients together, would stay reserved when DDP rebuilds its buckets."""
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    @contextmanager
    def _rewrap_around_migration(self, casts: bool) -> Iterator[None]:
        """Rebuilds DistributedDataParallel, whose buckets hold gradients, where a migration changes weights' types."""
        wrapped = isinstance(self.model, DistributedDataParallel) and casts
        if wrapped:
            self._module.zero_grad(set_to_none=True)  # views of its buckets
            self.model = self._module
            gc.collect()  # it is in cycles, and its hooks go with it
        try:
            yield
        finally:
            if wrapped:
                self._wrap()

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Lightning's step. After the first one DDP rebuilds its buckets: gradients, which hold the old, are freed."""
        out = super().optimizer_step(optimizer, *args, **kwargs)
        if self._first_since_wrapped:
            self._first_since_wrapped = False
            optimizer.zero_grad(set_to_none=True)
        return out

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state as on one device. Raises TrainingFailedError if weights differ between ranks."""
        check_equal_on_ranks(checksum(self._module.parameters()), what="weights", among=self.ranks)
        return super().optimizer_state(optimizer)


def checksum(tensors: Iterable[torch.Tensor]) -> float:
    """A hash of the tensors' bytes: sums of words per tensor, combined modulo PRIME."""
    flat = (tensor.detach().contiguous().view(-1) for tensor in tensors)
    words = (part.view(torch.int16 if part.element_size() % 2 == 0 else torch.uint8) for part in flat)
    sums = [part.sum(dtype=torch.int64) % PRIME for part in words]
    combined = 0
    for value in torch.stack(sums).tolist() if sums else ():
        combined = (combined * 31 + value) % PRIME
    return float(combined)


# `Trainer(strategy="baoc")`, and `"baoc_state_25"` for each preset of a budget; `"baoc_ddp"` likewise.
for _strategy in (BaocStrategy, BaocDDPStrategy):
    for _suffix, _budget in {"": AUTO, **{f"_{preset}": preset for preset in PRESETS}}.items():
        _name, _description = _strategy.strategy_name + _suffix, f"trains inside budget={_budget}"
        StrategyRegistry.register(_name, _strategy, _description, budget=_budget, override=True)
