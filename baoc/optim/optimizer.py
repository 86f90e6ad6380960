"""BlockwiseOptimizer: one torch optimizer whose blocks each run the spec that an allocation gave them.

It decides nothing about specs: they are given when it is built, and changed by `migrate`. A step (`_step`) is

1. the registry's backends, built anew only where something moved since the last step (`_ready`),
2. the finite check (`finite_check`, in `baoc.optim.nonfinite`), which may mask elements or skip the step,
3. who subscribed to `before_step` and sees the final gradients,
4. the backends, one for all blocks that it can step (`baoc.optim.backends`: eager, native, fused, hosted),
5. who subscribed to `after_step`.

Gradient release and overlap step blocks in backward already, and meet in `baoc.optim.backward`.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from baoc.core.recipes import Tuned, Tuning
from baoc.errors import BadInputError, InfeasibleBudgetError, unknown_name
from baoc.optim import checkpoint, groups, loading, masters, matching, seeding
from baoc.optim import migrate as migration
from baoc.optim.backends import BACKENDS, Options, StepInputs, StepUnit
from baoc.optim.backward import DropGradients, GradientRelease, KeepGradients, release_settings, take_from_others
from baoc.optim.load_watch import watch_loads
from baoc.optim.nonfinite import NonFiniteFilter
from baoc.optim.registry import BlockRegistry, check_new
from baoc.optim.state import FIRST_BETAS, LiveBlock, alone, betas_of
from baoc.optim.wrappers import watch_averages
from baoc.parallel import ranks
from baoc.types import Block, BlockMove, Moments, OptimizerSpec, ParamInfo

# Wrapped by schedulers, or set by whoever owns us: not part of a copy.
_UNKEPT = ("step", "overlap", "before_check", "before_step", "after_step", "late_planner", "network")


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeStep:
    """A subscriber to `BlockwiseOptimizer.before_step`.

    Attributes:
        call: Called in each step, when gradients are final and non-finite elements in them are 0. It may change
            parameter groups.
        wanted: False while `call` does not need the gradients of the coming step, which may then be used before it.
    """

    call: Callable[[], object]
    wanted: Callable[[], bool] = lambda: True


class BlockwiseOptimizer(Optimizer):
    """An optimizer with one spec per block.

        optimizer = BlockwiseOptimizer(model, "adamw_int8+split8", lr=3e-4)  # 3.1 bytes of state, 2 of weight
        optimizer = BlockwiseOptimizer(model, {"head.weight": "adamw", "head.bias": "adamw", "body": "lion_int8"}, ...)

    `adamw_int8+split8` is AdamW with 8-bit states and bf16 weights that have an 8-bit correction; `python -m
    baoc.optim.table` prints the bytes of every spec. State is allocated at once, for trainable parameters only. Weights
    that are not native make the parameters bf16 when the optimizer is built, so run the model in bf16 or under bf16
    autocast; `export_weights` returns fp32, and moving a block back to native weights restores them.
    `lr`, `betas`, `eps` and `weight_decay` are those of `torch.optim.AdamW`.

    Args:
        params: A module, named or plain parameters, or groups of either. Groups are kept as they are.
        specs: One spec for all, or block name -> spec.
        blocks: Sets of parameters by name. None makes every parameter a block.
        nonfinite: Effect of a NaN, an infinity, or an element of 2^48 and more in a gradient. `skip_element` keeps its
            weight and states and leaves it out of every mean; `skip_step` skips the whole step; `raise` raises
            TrainingFailedError.
        rms_matching: Scale each block's update to AdamW's RMS. False runs rules as published. "displacement" scales
            rules without momentum to AdamW's update without momentum.
        target_rms: That RMS by block; .2 where it is missing.
        backend: "auto", or the backend that steps every block.
        release: Step each block in the backward pass, and drop its gradients. True, or GradientRelease(clip_norm=...),
            because clip_grad_norm_ finds none afterwards. Accumulation is refused; `step()` is called as before.
        tuning: Multiples of the learning rate and betas by rule and role, see `baoc.core.recipes`. A schedule goes on
            acting: it moves the rate that is multiplied, and a beta that it moves is the schedule's.
        device: Parameters that are elsewhere move there one by one, in the format of their spec.

    Attributes:
        finite_check: Decides in each step which gradient elements are left out, or that the step is skipped. It may be
            replaced by another with the methods of `NonFiniteFilter`; its `vote` lets processes decide together.
        before_step: `BeforeStep` subscribers. None with gradient release, see `DropGradients.observer`.
        after_step: Callables without arguments, called when all blocks were stepped. As before_step no part
            of copies.
        releaser: What steps blocks in backward with gradient release, else None.
        overlap: What steps host-placed blocks inside `last_backward`.
        load_report: What the last `load_state_dict` converted.
        late_planner: Says which spec each parameter runs that comes late; None runs the one given for all, or fp32
            AdamW. `network`: a weak reference to the module by whose names such are called. Neither is of copies.
    """

    def __init__(
        self,
        params: Any,
        specs: str | OptimizerSpec | Mapping[str, str | OptimizerSpec] = "adamw",
        *,
        blocks: Sequence[Block] | None = None,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        nonfinite: str = "skip_element",
        rms_matching: bool | matching.Matching = True,
        target_rms: Mapping[str, float] | None = None,
        backend: str = "auto",
        release: bool | GradientRelease = False,
        tuning: Tuning | None = None,
        device: torch.device | None = None,
    ):
        if backend not in ("auto", *BACKENDS):
            raise unknown_name(backend, what="optimizer backend", allowed=("auto", *BACKENDS))
        if not isinstance(rms_matching, bool) and rms_matching not in matching.MATCHINGS:
            raise unknown_name(rms_matching, what="way of matching updates", allowed=matching.MATCHINGS)
        self.rms_matching = bool(rms_matching)
        matched_by = "rms" if isinstance(rms_matching, bool) else rms_matching
        releasing = release_settings(release, nonfinite=nonfinite)
        self.before_check: list[Callable[[], object]] = []  # of one step, by overlap
        self.before_step: list[BeforeStep] = []
        self.after_step: list[Callable[[], object]] = []
        self.late_planner: Callable[[Sequence[ParamInfo]], Mapping[str, str]] | None = None
        self.network = weakref.ref(params) if isinstance(params, torch.nn.Module) else None
        self.releaser: DropGradients | None = None
        self.load_report: loading.LoadReport | None = None
        self.finite_check = NonFiniteFilter(nonfinite)
        self.num_steps = 0  # the codecs' phase
        self._stalling: set[str] = set()  # blocks that were warned of
        self._unseeded = False  # whether the next step has to start some v
        self._registry: BlockRegistry | None = None
        self._keeps_betas = tuning is not None and bool(tuning.betas)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups.to_groups(params), {key: groups.plain(value) for key, value in defaults.items()})
        registry = BlockRegistry(
            self.state, backend=backend, target_rms=target_rms or {}, matched_by=matched_by, tuning=tuning
        )
        take_from_others([param for group in self.param_groups for param in group["params"]])
        registry.build(self.param_groups, specs=specs, blocks=blocks, device=device)
        self._registry = registry
        if registry.twins:
            self.finite_check.vote = lambda found: bool(ranks().most(found)[0])
        self.overlap = KeepGradients(self)
        if releasing is not None:
            self.releaser = DropGradients(self, releasing)
            self._step_supports_amp_scaling = True  # so that a GradScaler comes to `step`, where it is refused
        self._warn_of_stalling(registry.live)
        if isinstance(params, torch.nn.Module):
            watch_loads(params, self)
        watch_averages(self)

    @property
    def registry(self) -> BlockRegistry:
        assert self._registry is not None
        return self._registry

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; parameters that come late run the spec that was given for all, else fp32 AdamW."""
        if self._registry is not None:
            param_group = self._with_names(param_group)
            (param_group,) = groups.to_groups([param_group], held=self.param_groups)
        groups.check_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group, index = self.param_groups[-1], len(self.param_groups) - 1
        group["betas"] = tuple(float(beta) for beta in group["betas"])
        if self._keeps_betas:
            group.setdefault(FIRST_BETAS, group["betas"])
        if self._registry is not None:
            pairs = zip(group["param_names"], group["params"], strict=True)
            infos = [groups.param_info(name, param, group=index) for name, param in pairs if param.requires_grad]
            try:
                self._admit(infos)
            except (BadInputError, InfeasibleBudgetError):
                self.param_groups.pop()
                raise

    def _admit(self, infos: list[ParamInfo]) -> None:
        """Parameters that come late get states, by the specs of whoever plans, and what else they need."""
        specs = self.late_planner(infos) if self.late_planner is not None and infos else None
        self.registry.add_late_params(infos, param_groups=self.param_groups, specs=specs)
        self._welcome()

    def _with_names(self, group: dict[str, Any]) -> dict[str, Any]:
        """A late group whose plain parameters are called what the network calls them, where it has all of them."""
        network = None if self.network is None else self.network()
        given = group.get("params")
        if network is None or given is None or "param_names" in group:
            return group
        params = [given] if isinstance(given, Tensor) else list(given)
        names = {id(param): name for name, param in network.named_parameters()}
        if all(isinstance(param, Tensor) and id(param) in names for param in params):
            params = [(names[id(param)], param) for param in params]
        return {**group, "params": params}

    def _welcome(self) -> None:
        """What parameters that came late get beside their states."""
        loading.load_late(self.registry, param_groups=self.param_groups)
        self._note_unseeded()
        self._warn_of_stalling(self.registry.live)
        if self.releaser is not None:
            self.releaser.attach()

    def _note_unseeded(self) -> None:
        self._unseeded = any(live.unseeded for live in self.registry.live.values())

    def _warn_of_stalling(self, names: Iterable[str]) -> None:
        """Once per block."""
        new = [name for name in masters.stalling(self.registry, names) if name not in self._stalling]
        self._stalling.update(new)
        if new:
            masters.warn_of_stalling(new)

    # -- stepping -------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. A closure is run once, with gradients enabled, and its result returned.

        With gradient release most of it was done in the backward before, and this ends it.
        """
        # What torch wraps around a step, a name for profilers and calls of hooks, costs as much as a fifth of it.
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
        ):
            return self._hooked_step(closure)
        return self._step(closure)

    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]

    @torch.no_grad()
    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._notice_params()
        if self.releaser is not None:  # blocks were stepped in backward
            self.releaser.finish()
            self._count_step()
            return loss
        if self.registry.twins:
            self.registry.lend_gradients()
            try:
                return self._step_all(loss)
            finally:
                self.registry.return_gradients()
        return self._step_all(loss)

    def _step_all(self, loss: Any) -> Any:
        """A step whose gradients are there."""
        for look in tuple(self.before_check):
            look()
        unit = self._ready()
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._capture(unit)
            return loss
        options = self.options()  # before what is known of the gradients is taken: it may raise
        masks = self.finite_check.check(unit, step=self.num_steps + 1, final=bool(self.before_step))
        if masks is None:
            return loss
        if self.before_step:
            for subscriber in tuple(self.before_step):
                subscriber.call()
            options = self.options()  # which they may have changed
        if self._unseeded:
            self.seed(self.registry.live.values())
        inputs = self.inputs(masks, options=options, phase=self.num_steps + 1)
        self.num_steps += 1
        for backend in unit.backends:
            backend(inputs)
        for join in unit.joins:
            join()
        for slot in self.registry.idle:
            if slot.param.grad is not None:
                self.registry.state[slot.param]["step"] += 1
        for subscriber in tuple(self.after_step):
            subscriber()
        return loss

    _hooked_step = Optimizer.profile_hook_step(_step)

    def _notice_params(self) -> None:
        """Admits parameters that were frozen and have a gradient now. Raises BadInputError where some were replaced."""
        registry = self.registry
        try:  # by identity first, so it takes no time; two tensors that differ have no truth value
            same = [group["params"] for group in self.param_groups] == registry.listed
        except RuntimeError:
            same = False
        if not same:
            raise BadInputError(
                "the parameters in param_groups are not those that this optimizer has states of: add new ones with "
                "add_param_group, and build another optimizer where some were replaced"
            )
        if registry.frozen and any([param.grad is not None for param in registry.frozen]):
            self._admit(registry.thawed(self.param_groups))

    def _ready(self) -> StepUnit:
        """What a step goes through: as it was, unless parameters or states moved since the last one."""
        registry = self.registry
        unit, held = registry.unit, registry.witness
        if unit is None or registry.unstepped or not registry.placed:
            return registry.ready()
        if held is not None and held[0].get(held[1]) is not held[2]:
            return registry.ready()
        if any([backend.moved for backend in unit.backends]):  # a list is faster than a generator
            registry.drop_backends()
            return registry.ready()
        return unit

    def seed(self, blocks: Iterable[LiveBlock]) -> None:
        """Starts v of `blocks` that wait for their next gradient, which is there now, see `baoc.optim.seeding`."""
        seeding.seed(blocks, registry=self.registry, param_groups=self.param_groups)
        self._note_unseeded()

    def _count_step(self) -> None:
        """Ends a step whose blocks were stepped in backward."""
        self.num_steps += 1
        self._note_unseeded()
        for subscriber in tuple(self.after_step):
            subscriber()

    def last_backward(self) -> AbstractContextManager[None]:
        """`with optimizer.last_backward(): loss.backward()` lets host-placed blocks be stepped in backward already.

        To be said of the last backward before `step` if nothing clips, unscales or drops gradients between the two.
        """
        return self.overlap.last_backward()

    def options(self) -> list[Options]:
        """What the parameter groups say now, then what tuned blocks make of it.

        Raises BadInputError for what no schedule can mean.
        """
        plain = []
        for group in self.param_groups:
            lr, betas, eps, decay = float(group["lr"]), group["betas"], group["eps"], group["weight_decay"]
            first, second = betas
            if not (0 <= lr < inf and 0 <= decay < inf and eps > 0 and 0 <= first < 1 and 0 <= second < 1):
                groups.check_settings({**group, "lr": lr})  # a schedule made them what weights would not survive
            plain.append(Options(lr=lr, betas=betas, eps=eps, weight_decay=decay))
        rows = self.registry.rows
        return plain if not rows else plain + [self._tuned(plain[group], tuned, group) for group, tuned in rows]

    def _tuned(self, options: Options, tuned: Tuned, group: int) -> Options:
        """A group's settings as a block of it has them that learns at a rate and with betas of its own."""
        betas = betas_of(tuned, self.param_groups[group])
        return Options(lr=options.lr * tuned.lr, betas=betas, eps=options.eps, weight_decay=options.weight_decay)

    def inputs(self, masks: Mapping[Tensor, Tensor], *, options: Sequence[Options], phase: int) -> StepInputs:
        """What backends are told of a step; `phase` is its number, from 1."""
        return StepInputs(
            state=self.registry.state, options=options, masks=masks, phase=phase, matching=self.rms_matching
        )

    def _capture(self, unit: StepUnit) -> None:
        """The device's part of a step, which somebody captures in a CUDA graph."""
        if self.nonfinite != "skip_element":
            raise BadInputError(
                f"nonfinite={self.nonfinite} waits for the device, so the step cannot be captured: use skip_element"
            )
        for backend in unit.backends:
            backend.capture(self.inputs({}, options=self.options(), phase=self.num_steps))

    @torch.no_grad()
    def prepare_replay(self) -> None:
        """To be called before each replay of a CUDA graph in which `step` was captured.

        A capture only takes down what the device does. This does the host's part: it counts the step and sends learning
        rates, bias corrections and the gradients' addresses to where the graph reads them. Run some steps before
        capturing, so that kernels are compiled and each block's update RMS is measured.

        Raises BadInputError with gradient release.
        """
        if self.releaser is not None:
            raise BadInputError("steps with gradient release cannot be replayed as a CUDA graph: build without release")
        unit, options = self.registry.ready(), self.options()
        self.num_steps += 1
        inputs = self.inputs({}, options=options, phase=self.num_steps)
        for backend in unit.backends:
            backend.prepare(inputs)

    @torch.no_grad()
    def mask_nonfinite(self) -> int | None:
        """Zeroes non-finite gradient elements, to be called before clipping; returns how many there were.

        The coming step leaves them out as `nonfinite` says. Without this call the step looks for itself. The fused
        backend does it in one pass without waiting for the device, so that the number is not known yet and None is
        returned; it leaves -0.0 as a mark, which scaling and clamping keep: add nothing to these gradients afterwards.
        With gradient release it was done in backward; this steps the blocks of which some parameters have no gradient.
        """
        self.registry.lend_gradients()
        unit = self.registry.ready()
        if self.releaser is not None:
            self.releaser.flush()
            return None if unit.marking else self.releaser.num_nonfinite
        self.overlap.check()
        found = self.finite_check.mask(unit, step=self.num_steps + 1)
        self.overlap.accept_masks()
        return found

    def _check_between_steps(self, what: str) -> None:
        for stepping in filter(None, (self.releaser, self.overlap)):
            stepping.check_between_steps(what)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; what `mask_nonfinite` found in the gradients goes with them."""
        if self.releaser is not None:
            self.releaser.check_zeroing(set_to_none=set_to_none)
        self.overlap.check_between_steps("zero_grad was called")
        self.finite_check.forget(self.registry.everything)
        self.registry.return_gradients()
        super().zero_grad(set_to_none)

    @property
    def nonfinite(self) -> str:
        return self.finite_check.policy

    @property
    def num_nonfinite(self) -> int:
        """Non-finite gradient elements since this optimizer was built."""
        self.finite_check.read(self.registry.everything, step=self.num_steps + 1, wait=True)
        return self.finite_check.num_nonfinite

    @property
    def last_nonfinite(self) -> dict[str, int]:
        """Parameter name -> non-finite elements, when there last were some."""
        self.finite_check.read(self.registry.everything, step=self.num_steps + 1, wait=True)
        return self.finite_check.last_nonfinite

    @property
    def num_skipped_steps(self) -> int:
        return self.finite_check.num_skipped_steps

    # -- what it holds --------------------------------------------------------------------------------------------

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(live.block for live in self.registry.live.values())

    @property
    def specs(self) -> dict[str, str]:
        """Block name -> name of the spec it runs."""
        return {name: live.spec.name for name, live in self.registry.live.items()}

    def block_state_bytes(self) -> dict[str, int]:
        """Live bytes of optimizer state on the device by block, steps and matching factors included."""
        return {name: self.registry.block_bytes(live) for name, live in self.registry.live.items()}

    def block_host_bytes(self) -> dict[str, int]:
        """Live bytes of the state that host-placed blocks keep on the host, by block; 0 of others."""
        return {name: self.registry.block_host_bytes(live) for name, live in self.registry.live.items()}

    def state_bytes(self) -> int:
        return sum(self.block_state_bytes().values())

    @torch.no_grad()
    def update_rms(self, blocks: Iterable[str] | None = None) -> dict[str, float]:
        """Block -> RMS of its last update before the learning rate, of the blocks (of `blocks`) that can tell."""
        asked = self.registry.live if blocks is None else blocks
        rms = {name: migration.rms_of(name, registry=self.registry, param_groups=self.param_groups) for name in asked}
        return {name: float(value) for name, value in rms.items() if value is not None}

    # -- changing it ----------------------------------------------------------------------------------------------

    def set_target_rms(self, target_rms: Mapping[str, float]) -> None:
        """New AdamW update RMS by block, from a profile. Blocks that are matched now take it at their next step."""
        for name, target in target_rms.items():
            if name not in self.registry.live:
                raise unknown_name(name, what="block", allowed=self.registry.live)
            if not target > 0:
                raise BadInputError(f"the target RMS of {name} is {target}: give a positive number")
            self.registry.target_rms[name] = float(target)
            live = self.registry.live[name]
            if live.match is not None:
                live.match[0] = self.registry.own_target(live, target=float(target))

    @torch.no_grad()
    def retune(self, tuning: Tuning | None) -> None:
        """Rates and betas by rule and role from the next step on, of blocks that are there and of those that come."""
        if tuning == self.registry.tuning:
            return
        self._keeps_betas = tuning is not None and bool(tuning.betas)
        for group in self.param_groups if self._keeps_betas else ():
            group.setdefault(FIRST_BETAS, group["betas"])
        self.registry.retune(tuning, param_groups=self.param_groups)

    def migrate(
        self,
        specs: Mapping[str, str | OptimizerSpec],
        *,
        moments: Mapping[str, Moments] | None = None,
        why: str = "",
    ) -> list[BlockMove]:
        """Moves blocks to other specs; states are inherited (docs/methods.md#state-inheritance), other blocks stay.

        `moments` (by parameter name) start v where a block had none. Nothing changes if any of `specs` is refused. Done
        block by block, those that shrink first, so memory never exceeds the larger plan by more than a block.
        """
        live, targets, where = self.registry.live, [], groups.named_params(self.param_groups)
        for name, given in specs.items():
            if name not in live:
                raise unknown_name(name, what="block", allowed=live)
            spec = groups.to_spec(given)
            groups.check_applies(spec, block=live[name].block)
            if spec != live[name].spec:
                targets.append(self.registry.make_block(live[name].block, spec=spec, where=where))
        self._check_between_steps("migrate was called")
        check_new(targets)
        self.registry.forget_overwritten()
        targets.sort(key=lambda target: migration.planned_growth(target, held=live[target.block.name]))
        self.registry.refresh(self.param_groups)  # backends hold what is to be freed
        moves, fresh = {}, self.num_steps == 0
        with self.finite_check.through_cast():
            for target in targets:
                moves[target.block.name] = migration.move(
                    target,
                    registry=self.registry,
                    param_groups=self.param_groups,
                    moments=moments or {},
                    fresh=fresh,
                    why=why,
                )
        self.registry.refresh(self.param_groups)
        self._note_unseeded()
        self._warn_of_stalling(moves)
        return [moves[name] for name in live if name in moves]

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """States by parameter name, groups, and the spec of every block; see `optim.checkpoint`."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self._check_between_steps("state_dict was called")
        state = checkpoint.save(
            self.registry, param_groups=self.param_groups, num_steps=self.num_steps, waiting=self.registry.waiting
        )
        if self.releaser is not None:
            state["release"] = self.releaser.state_dict()
        for hook in self._optimizer_state_dict_post_hooks.values():
            state = hook(self, state) or state
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads BAOC's own or torch.optim.AdamW's checkpoint by parameter name, converted to the specs in force.

        `load_report` then says what was converted, with which error, and which names were on one side only. Load the
        model before: weights are its own to load, and of split ones the checkpoint has the corrections. Raises
        CheckpointError before anything is changed.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        names = [name for group in self.param_groups for name in group["param_names"]]
        saved = checkpoint.read(state_dict, names=names)
        self.load_report = loading.load(
            saved, registry=self.registry, param_groups=self.param_groups, checked=lambda: self._resume(state_dict)
        )
        self.num_steps, self.registry.unstepped = saved.num_steps, True
        if self.releaser is not None:
            self.releaser.load_state_dict(state_dict.get("release"))
        self._note_unseeded()
        self.registry.refresh(self.param_groups)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _resume(self, state_dict: dict[str, Any]) -> None:
        """For subclasses: what else to take from a checkpoint, once it is checked and before states are filled."""

    @torch.no_grad()
    def to_adamw_state_dict(self) -> dict[str, Any]:
        """A state dict that torch.optim.AdamW over the same groups loads; what a rule does not keep is inferred."""
        return checkpoint.to_adamw(self.registry, param_groups=self.param_groups)

    @torch.no_grad()
    def export_weights(self) -> dict[str, Tensor]:
        """Name -> fp32 copy on the CPU of every parameter, corrections added: what a model without BAOC loads."""
        return masters.export(self.registry, param_groups=self.param_groups)

    @torch.no_grad()
    def load_weights(self, values: Mapping[str, Tensor]) -> None:
        """Sets parameters to fp32 (or other) numbers by name, each kept as its block keeps weights. Others stay.

        Raises BadInputError for an unknown name or another shape, with nothing changed.
        """
        masters.load(values, registry=self.registry, param_groups=self.param_groups)

    # -- copies ---------------------------------------------------------------------------------------------------

    def __copy__(self) -> "BlockwiseOptimizer":
        """A shallow copy shares parameters, states and plan, as of any optimizer."""
        if self.releaser is not None:
            raise TypeError("a shallow copy would step the same parameters in backward as well: use copy.deepcopy")
        twin = object.__new__(type(self))
        shared = {"overlap": self.overlap, "before_check": self.before_check}
        Optimizer.__setstate__(twin, {**self._own(), **self._subscribed(), **shared})
        return twin

    @staticmethod
    def _subscribed() -> dict[str, Any]:
        """The subscribers of a copy: none."""
        return {"before_check": [], "before_step": [], "after_step": [], "late_planner": None, "network": None}

    def _own(self) -> dict[str, Any]:
        hidden = ("_optimizer_", "_warned", "_zero_grad")
        return {k: v for k, v in self.__dict__.items() if not k.startswith(hidden) and k not in _UNKEPT}

    def __getstate__(self) -> dict[str, Any]:
        # Each tensor as a storage of its own: pickle would write a whole slab for each of its views.
        self.registry.synchronize()
        held = self.registry.state.items()
        states = {param: {key: alone(value) for key, value in state.items()} for param, state in held}
        return {**self._own(), "state": defaultdict(dict, states)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, **self._subscribed()})
        self.overlap = KeepGradients(self)
        if self._registry is not None:
            self._registry.adopt(self.state)
        if self.releaser is not None:
            self.releaser.adopt(self)
