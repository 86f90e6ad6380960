"""BlockwiseOptimizer: one torch optimizer whose blocks each run the spec that an allocation gave them.

It decides nothing about specs: they are given when it is built, and changed by `migrate`. A step is `step` here, then
`backends.eager.step_bucket` for all blocks of a spec, then the rule's `direction` in `baoc.optim.rules`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from baoc.core.recipes import Tuned, Tuning
from baoc.errors import BadInputError, unknown_name
from baoc.kernels import capturing
from baoc.optim import admission, checkpoint, groups, loading, masters, matching, replay, seeding, step_hooks
from baoc.optim import migrate as migration
from baoc.optim.backends import BACKENDS, Options, StepInputs, options_of
from baoc.optim.load_watch import watch_loads
from baoc.optim.nonfinite import Guard
from baoc.optim.overlap import Ahead
from baoc.optim.registry import Roster
from baoc.optim.release import Releaser, take_from_others
from baoc.optim.release_settings import GradientRelease, check_policy, settings_of
from baoc.optim.state import FIRST_BETAS, alone, betas_of
from baoc.types import Block, BlockMove, Moments, OptimizerSpec

# Wrapped by schedulers, or set by whoever owns us: not part of a copy.
_UNKEPT = ("step", "observer", "observing", "ahead")


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
        releasing = settings_of(release)
        if releasing is not None:
            check_policy(nonfinite)
        self.observer: Callable[[], object] | None = None  # called in each step when gradients are final
        self.observing: Callable[[], bool] | None = None  # False: the observer does not need the coming step
        self.releaser: Releaser | None = None
        self.load_report: loading.LoadReport | None = None
        self._guard = Guard(nonfinite)
        self.num_steps = 0  # the codecs' phase
        self._stalling: set[str] = set()  # blocks that were warned of
        self._unseeded = False  # whether the next step has to start some v
        self._roster: Roster | None = None
        self._keeps_betas = tuning is not None and bool(tuning.betas)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups.to_groups(params), {key: groups.plain(value) for key, value in defaults.items()})
        roster = Roster(self.state, backend=backend, target_rms=target_rms or {}, matched_by=matched_by, tuning=tuning)
        take_from_others([param for group in self.param_groups for param in group["params"]])
        roster.build(self.param_groups, specs=specs, blocks=blocks, device=device)
        self._roster = roster
        self.ahead = Ahead(self)
        if releasing is not None:
            self.releaser = Releaser(self, releasing)
            self._step_supports_amp_scaling = True  # so that a GradScaler comes to `step`, where it is refused
        self._warn_of_stalling(roster.live)
        if isinstance(params, torch.nn.Module):
            watch_loads(params, self)

    @property
    def roster(self) -> Roster:
        assert self._roster is not None
        return self._roster

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; parameters that come late run the spec that was given for all, else fp32 AdamW."""
        if self._roster is not None:
            (param_group,) = groups.to_groups([param_group], held=self.param_groups)
        groups.check_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group, index = self.param_groups[-1], len(self.param_groups) - 1
        group["betas"] = tuple(float(beta) for beta in group["betas"])
        if self._keeps_betas:
            group.setdefault(FIRST_BETAS, group["betas"])
        if self._roster is not None:
            pairs = zip(group["param_names"], group["params"], strict=True)
            infos = [groups.param_info(name, param, group=index) for name, param in pairs if param.requires_grad]
            try:
                self._roster.admit(infos, param_groups=self.param_groups)
            except BadInputError:
                self.param_groups.pop()
                raise
            self._welcome()

    def _welcome(self) -> None:
        """What parameters that came late get beside their states."""
        loading.load_late(self.roster, param_groups=self.param_groups)
        self._note_unseeded()
        self._warn_of_stalling(self.roster.live)
        if self.releaser is not None:
            self.releaser.attach()

    def _note_unseeded(self) -> None:
        self._unseeded = any(live.unseeded for live in self.roster.live.values())

    def _warn_of_stalling(self, names: Iterable[str]) -> None:
        """Once per block."""
        new = [name for name in masters.stalling(self.roster, names) if name not in self._stalling]
        self._stalling.update(new)
        if new:
            masters.warn_of_stalling(new)

    # -- stepping -------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. A closure is run once, with gradients enabled, and its result returned.

        With gradient release most of it was done in the backward before, and this ends it.
        """
        # What torch wraps around a step, a name for profilers and calls of hooks, costs as much as a fifth of it.
        if step_hooks.wanted(self):
            return self._hooked_step(closure)
        return self._step(closure)

    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]

    @step_hooks.without_grad
    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        roster = self.roster
        num_blocks = len(roster.live)
        groups.check_listed(self.param_groups, listed=roster.listed)
        roster.admit_thawed(self.param_groups)
        if len(roster.live) != num_blocks:
            self._welcome()
        if self.releaser is not None:
            self.releaser.finish()
            self.num_steps += 1
            self._note_unseeded()
            self.releaser.say_late()
            return loss
        self.ahead.finish()
        backends = roster.ready()
        if capturing():
            replay.capture(self, backends)
            return loss
        options = self.options()  # before what is known of the gradients is taken: it may raise
        masks = self._guard.take(roster, step=self.num_steps + 1, final=self.observer is not None)
        if masks is None:
            return loss
        if self.observer is not None:
            self.observer()
            options = self.options()  # which it may have changed
        if self._unseeded:
            seeding.seed(roster.live.values(), roster=roster, param_groups=self.param_groups)
            self._note_unseeded()
        self.num_steps += 1
        inputs = self.inputs(masks, options=options, phase=self.num_steps)
        for backend in backends:
            backend(inputs)
        roster.join()
        self.ahead.say_late()
        return loss

    _hooked_step = Optimizer.profile_hook_step(_step)

    def last_backward(self, *, flush_only: bool = False) -> AbstractContextManager[None]:
        """`with optimizer.last_backward(): loss.backward()` lets host-placed blocks be stepped in backward already.

        To be said of the last backward before `step` if nothing clips, unscales or drops gradients between the two.
        `flush_only`: blocks that the host updates only get their gradients there, and all are stepped by `step`.
        """
        return self.ahead.last_backward(flush_only=flush_only)

    def options(self) -> list[Options]:
        """What the parameter groups say now, then what tuned blocks make of it.

        Raises BadInputError for what no schedule can mean.
        """
        plain = [options_of(group) for group in self.param_groups]
        rows = self.roster.rows
        return plain if not rows else plain + [self._tuned(plain[group], tuned, group) for group, tuned in rows]

    def _tuned(self, options: Options, tuned: Tuned, group: int) -> Options:
        """A group's settings as a block of it has them that learns at a rate and with betas of its own."""
        betas = betas_of(tuned, self.param_groups[group])
        return Options(lr=options.lr * tuned.lr, betas=betas, eps=options.eps, weight_decay=options.weight_decay)

    def inputs(self, masks: Mapping[Tensor, Tensor], *, options: Sequence[Options], phase: int) -> StepInputs:
        """What backends are told of a step; `phase` is its number, from 1."""
        return StepInputs(
            state=self.roster.state, options=options, masks=masks, phase=phase, matching=self.rms_matching
        )

    @torch.no_grad()
    def prepare_replay(self) -> None:
        """To be called before each replay of a CUDA graph in which `step` was captured.

        A capture only takes down what the device does. This does the host's part: it counts the step and sends learning
        rates, bias corrections and the gradients' addresses to where the graph reads them. Run some steps before
        capturing, so that kernels are compiled and each block's update RMS is measured.
        """
        replay.prepare(self)

    @torch.no_grad()
    def mask_nonfinite(self) -> int | None:
        """Zeroes non-finite gradient elements, to be called before clipping; returns how many there were.

        The coming step leaves them out as `nonfinite` says. Without this call the step looks for itself. The fused
        backend does it in one pass without waiting for the device, so that the number is not known yet and None is
        returned; it leaves -0.0 as a mark, which scaling and clamping keep: add nothing to these gradients afterwards.
        With gradient release it was done in backward; this steps the blocks of which some parameters have no gradient.
        """
        self.roster.ready()
        if self.releaser is not None:
            self.releaser.flush()
            return None if self.roster.marking else self.releaser.num_nonfinite
        self.ahead.check()
        found = self._guard.look(self.roster, step=self.num_steps + 1)
        self.ahead.looked()
        return found

    def _check_between_steps(self, what: str) -> None:
        for stepping in filter(None, (self.releaser, self.ahead)):
            stepping.check_between_steps(what)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; what `mask_nonfinite` found in the gradients goes with them."""
        if self.releaser is not None:
            self.releaser.check_zeroing(set_to_none=set_to_none)
        self.ahead.check_between_steps("zero_grad was called")
        self._guard.forget(self.roster)
        super().zero_grad(set_to_none)

    @property
    def nonfinite(self) -> str:
        return self._guard.policy

    @property
    def num_nonfinite(self) -> int:
        """Non-finite gradient elements since this optimizer was built."""
        self._guard.read(self.roster, step=self.num_steps + 1, wait=True)
        return self._guard.num_nonfinite

    @property
    def last_nonfinite(self) -> dict[str, int]:
        """Parameter name -> non-finite elements, when there last were some."""
        self._guard.read(self.roster, step=self.num_steps + 1, wait=True)
        return self._guard.last_nonfinite

    @property
    def num_skipped_steps(self) -> int:
        return self._guard.num_skipped_steps

    # -- what it holds --------------------------------------------------------------------------------------------

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(live.block for live in self.roster.live.values())

    @property
    def specs(self) -> dict[str, str]:
        """Block name -> name of the spec it runs."""
        return {name: live.spec.name for name, live in self.roster.live.items()}

    def block_state_bytes(self) -> dict[str, int]:
        """Live bytes of optimizer state on the device by block, steps and matching factors included."""
        return {name: self.roster.block_bytes(live) for name, live in self.roster.live.items()}

    def block_host_bytes(self) -> dict[str, int]:
        """Live bytes of the state that host-placed blocks keep on the host, by block; 0 of others."""
        return {name: self.roster.block_host_bytes(live) for name, live in self.roster.live.items()}

    def state_bytes(self) -> int:
        return sum(self.block_state_bytes().values())

    @torch.no_grad()
    def update_rms(self, blocks: Iterable[str] | None = None) -> dict[str, float]:
        """Block -> RMS of its last update before the learning rate, of the blocks (of `blocks`) that can tell."""
        asked = self.roster.live if blocks is None else blocks
        rms = {name: migration.rms_of(name, roster=self.roster, param_groups=self.param_groups) for name in asked}
        return {name: float(value) for name, value in rms.items() if value is not None}

    # -- changing it ----------------------------------------------------------------------------------------------

    def set_target_rms(self, target_rms: Mapping[str, float]) -> None:
        """New AdamW update RMS by block, from a profile. Blocks that are matched now take it at their next step."""
        for name, target in target_rms.items():
            if name not in self.roster.live:
                raise unknown_name(name, what="block", allowed=self.roster.live)
            if not target > 0:
                raise BadInputError(f"the target RMS of {name} is {target}: give a positive number")
            self.roster.target_rms[name] = float(target)
            live = self.roster.live[name]
            if live.match is not None:
                live.match[0] = self.roster.own_target(live, target=float(target))

    @torch.no_grad()
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
        live, targets = self.roster.live, []
        for name, given in specs.items():
            if name not in live:
                raise unknown_name(name, what="block", allowed=live)
            spec = groups.to_spec(given)
            groups.check_applies(spec, block=live[name].block)
            if spec != live[name].spec:
                targets.append(self.roster.made(live[name].block, spec=spec, param_groups=self.param_groups))
        self._check_between_steps("migrate was called")
        admission.check(targets)
        self.roster.forget_overwritten()
        targets.sort(key=lambda target: migration.planned_growth(target, held=live[target.block.name]))
        self.roster.refresh(self.param_groups)  # backends hold what is to be freed
        moves, fresh = {}, self.num_steps == 0
        with self._guard.through_cast():
            for target in targets:
                moves[target.block.name] = migration.move(
                    target,
                    roster=self.roster,
                    param_groups=self.param_groups,
                    moments=moments or {},
                    fresh=fresh,
                    why=why,
                )
        self.roster.refresh(self.param_groups)
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
            self.roster, param_groups=self.param_groups, num_steps=self.num_steps, waiting=self.roster.waiting
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
            saved, roster=self.roster, param_groups=self.param_groups, checked=lambda: self._resume(state_dict)
        )
        self.num_steps, self.roster.unstepped = saved.num_steps, True
        if self.releaser is not None:
            self.releaser.load_state_dict(state_dict.get("release"))
        self._note_unseeded()
        self.roster.refresh(self.param_groups)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _resume(self, state_dict: dict[str, Any]) -> None:
        """For subclasses: what else to take from a checkpoint, once it is checked and before states are filled."""

    @torch.no_grad()
    def to_adamw_state_dict(self) -> dict[str, Any]:
        """A state dict that torch.optim.AdamW over the same groups loads; what a rule does not keep is inferred."""
        return checkpoint.to_adamw(self.roster, param_groups=self.param_groups)

    @torch.no_grad()
    def export_weights(self) -> dict[str, Tensor]:
        """Name -> fp32 copy on the CPU of every parameter, corrections added: what a model without BAOC loads."""
        return masters.export(self.roster, param_groups=self.param_groups)

    @torch.no_grad()
    def load_weights(self, values: Mapping[str, Tensor]) -> None:
        """Sets parameters to fp32 (or other) numbers by name, each kept as its block keeps weights. Others stay.

        Raises BadInputError for an unknown name or another shape, with nothing changed.
        """
        masters.load(values, roster=self.roster, param_groups=self.param_groups)

    # -- copies ---------------------------------------------------------------------------------------------------

    def __copy__(self) -> "BlockwiseOptimizer":
        """A shallow copy shares parameters, states and plan, as of any optimizer."""
        if self.releaser is not None:
            raise TypeError("a shallow copy would step the same parameters in backward as well: use copy.deepcopy")
        twin = object.__new__(type(self))
        Optimizer.__setstate__(twin, {**self._own(), "observer": None, "observing": None, "ahead": self.ahead})
        return twin

    def _own(self) -> dict[str, Any]:
        hidden = ("_optimizer_", "_warned", "_zero_grad")
        return {k: v for k, v in self.__dict__.items() if not k.startswith(hidden) and k not in _UNKEPT}

    def __getstate__(self) -> dict[str, Any]:
        # Each tensor as a storage of its own: pickle would write a whole slab for each of its views.
        self.roster.settle()
        held = self.roster.state.items()
        states = {param: {key: alone(value) for key, value in state.items()} for param, state in held}
        return {**self._own(), "state": defaultdict(dict, states)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.observer = self.observing = None
        super().__setstate__(state)
        self.ahead = Ahead(self)
        if self._roster is not None:
            self._roster.adopt(self.state)
        if self.releaser is not None:
            self.releaser.adopt(self)
