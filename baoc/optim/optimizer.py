"""BlockwiseOptimizer: one torch optimizer in which each block of parameters runs the spec that an allocation gave it.

It decides nothing about specs: they are given when it is built, and changed by `migrate`. A step goes through

1. `current_unit`: the backends of all blocks, which `baoc.optim.registry` rebuilds only after a parameter or state has
   moved,
2. `finite_check` (`baoc.optim.nonfinite`), which may mask gradient elements or skip the step,
3. the subscribers of `before_step`, who see the final gradients,
4. the backends (`baoc.optim.backends`: eager, native, fused, hosted), each once for all blocks that it steps,
5. the subscribers of `after_step`.

`_step_all` has the first four. Gradient release and overlap step blocks during backward already, see
`baoc.optim.backward`.
"""

import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from baoc.core.recipes import Tuning
from baoc.errors import BadInputError, InfeasibleBudgetError, unknown_name
from baoc.optim import checkpoint, groups, loading, matching, seeding, weights
from baoc.optim import migrate as migration
from baoc.optim.backends import BACKENDS, Options, StepInputs, StepUnit
from baoc.optim.backward import (
    BeforeStep,
    DropGradients,
    GradientRelease,
    KeepGradients,
    detach_other_releases,
    release_settings,
)
from baoc.optim.nonfinite import NonFiniteFilter
from baoc.optim.registry import BlockRegistry, check_new_blocks
from baoc.optim.shards import local_shard, shard_of, unsharded
from baoc.optim.state import FIRST_BETAS, LiveBlock, LiveState, LiveStates, betas_of, with_own_storage
from baoc.optim.wrappers import watch_averages, watch_loads
from baoc.parallel import SINGLE_PROCESS, Ranks, check_same_on_ranks, ranks
from baoc.types import Block, BlockMove, Moments, OptimizerSpec, ParamInfo

# Attributes that copies leave out: schedulers wrap `step`, and the optimizer's owner sets the others.
_LEFT_OUT_OF_COPIES = ("step", "overlap", "before_check", "before_step", "after_step", "late_planner", "network")


class BlockwiseOptimizer(Optimizer):
    """An optimizer with one spec per block.

        optimizer = BlockwiseOptimizer(model, "adamw_int8+split8", lr=3e-4)  # 3.1 bytes of state, 2 of weight
        optimizer = BlockwiseOptimizer(model, {"head.weight": "adamw", "head.bias": "adamw", "body": "lion_int8"}, ...)

    `adamw_int8+split8` is AdamW with 8-bit states and bf16 weights that have an 8-bit correction; `python run.py --list
    specs` prints the bytes of every spec's state. Building it allocates the state of trainable parameters, and makes
    those bf16 whose spec has another weights format than native: run the model in bf16 or under bf16 autocast.
    `export_weights` returns fp32, and native weights are restored when a block moves back to them.
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
        backend: "auto", or the backend that steps every block.
        release: Step each block in the backward pass, and drop its gradients. GradientRelease(clip_norm=...) clips as
            well, because clip_grad_norm_ finds none afterwards. Accumulation is refused. Call `step()` as usual.
        tuning: Multiples of the learning rate and betas by rule and role, see `baoc.core.recipes`. The multiple is of
            the scheduled rate; a beta that a scheduler changes replaces the tuned one.
        device: Parameters on another device move there one by one, in the format of their spec.

    Attributes:
        finite_check: Decides in each step which gradient elements are left out, or that the step is skipped. Any object
            with the methods of `NonFiniteFilter` may replace it; its `vote` lets processes decide together.
        before_step: `BeforeStep` subscribers; refused with gradient release, see `DropGradients.observer`.
        after_step: Callables without arguments, called after each step, a skipped one too.
        releaser: Steps blocks in backward with gradient release; else None.
        overlap: Steps host-placed blocks in backward, inside `last_backward`.
        load_report: What the last `load_state_dict` converted.
        late_planner: Late parameters -> their specs by name; None: the spec given for all, or fp32 AdamW.
        network: Weak reference to the module that late parameters take their names from. Copies have neither of these
            two, and no subscribers.
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
        self.before_zeroing: list[Callable[[], object]] = []
        self.before_check: list[Callable[[], object]] = []  # overlap adds to it for one step
        self.before_step: list[BeforeStep] = []
        self.after_step: list[Callable[[], object]] = []
        self.late_planner: Callable[[Sequence[ParamInfo]], Mapping[str, str]] | None = None
        self.network = weakref.ref(params) if isinstance(params, torch.nn.Module) else None
        self.releaser: DropGradients | None = None
        self.load_report: loading.LoadReport | None = None
        self.finite_check = NonFiniteFilter(nonfinite)
        self.num_steps = 0  # completed steps, the codecs' phase
        self._stalling_blocks: set[str] = set()  # blocks that a warning has named
        self._unseeded = False  # whether the next step initializes some v (`seed`)
        self._registry: BlockRegistry | None = None
        self._tunes_betas = tuning is not None and bool(tuning.betas)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups.to_groups(params), {key: groups.to_plain(value) for key, value in defaults.items()})
        self.state = LiveStates(dict)
        registry = BlockRegistry(self.state, backend=backend, matched_by=matched_by, tuning=tuning)
        detach_other_releases([param for group in self.param_groups for param in group["params"]])
        registry.build(self.param_groups, specs=specs, blocks=blocks, device=device)
        self._registry = registry
        if registry.local_params:
            ranks()  # its first call waits for all ranks without a limit: `meet` would if it were the first
            self.finite_check.vote = lambda any_here: bool(ranks().all_reduce_max(any_here)[0])
        self.overlap = KeepGradients(self)
        if releasing is not None:
            self.releaser = DropGradients(self, releasing)
            self._step_supports_amp_scaling = True  # so that a GradScaler calls `step`, which refuses it
        self.warn_of_stalling(registry.live)
        if isinstance(params, torch.nn.Module):
            watch_loads(params, registry)
        watch_averages(self)

    @property
    def registry(self) -> BlockRegistry:
        assert self._registry is not None
        return self._registry

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Late parameters run the spec given for all, else fp32 AdamW.

        Raises BadInputError or InfeasibleBudgetError, with nothing added, if they cannot.
        """
        if self._registry is not None:
            self.changes_with.meet("add_param_group()")
            param_group = self._named_from_network(param_group)
            (param_group,) = groups.to_groups([param_group], existing=self.param_groups)
        groups.check_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group, index = self.param_groups[-1], len(self.param_groups) - 1
        group["betas"] = tuple(float(beta) for beta in group["betas"])
        if self._tunes_betas:
            group.setdefault(FIRST_BETAS, group["betas"])
        if self._registry is not None:
            pairs = zip(group["param_names"], group["params"], strict=True)
            infos = [groups.param_info(name, param, group=index) for name, param in pairs if param.requires_grad]
            try:
                self._add_late_params(infos)
            except (BadInputError, InfeasibleBudgetError):
                self.param_groups.pop()
                raise

    def _add_late_params(self, infos: list[ParamInfo]) -> None:
        """Gives late parameters their states, by the specs of `late_planner` if there is one."""
        specs = self.late_planner(infos) if self.late_planner is not None and infos else None
        self.registry.add_late_params(infos, param_groups=self.param_groups, specs=specs)
        loading.load_late(self.registry, param_groups=self.param_groups)
        self._update_unseeded()
        self.warn_of_stalling(self.registry.live)
        if self.releaser is not None:
            self.releaser.attach()

    def _named_from_network(self, group: dict[str, Any]) -> dict[str, Any]:
        """A late group with the network's names for plain parameters, if the network has all of them."""
        network = None if self.network is None else self.network()
        params = group.get("params")
        if network is None or params is None or "param_names" in group:
            return group
        params = [params] if isinstance(params, Tensor) else list(params)
        names = {id(param): name for name, param in network.named_parameters()}
        if all(isinstance(param, Tensor) and id(param) in names for param in params):
            params = [(names[id(param)], param) for param in params]
        return {**group, "params": params}

    def _update_unseeded(self) -> None:
        self._unseeded = any(live.unseeded for live in self.registry.live.values())

    def warn_of_stalling(self, names: Iterable[str]) -> None:
        """Warns once per block whose weights have 16 bits and are rounded to nearest."""
        lives = [self.registry.live[name] for name in names if name not in self._stalling_blocks]
        uncorrected = [live for live in lives if live.spec.weights in ("native", "bf16")]
        dtypes = weights.SIXTEEN_BIT_DTYPES
        new = [live.block.name for live in uncorrected if any(slot.param.dtype in dtypes for slot in live.slots)]
        if new:
            self._stalling_blocks.update(new)
            warnings.warn(
                "16-bit weights without correction lose every update below 1/512 of a weight, so at a low learning "
                f"rate they stand still. Block(s): {', '.join(new)}. Keep weights in fp32 (precision=bf16-mixed), or "
                "give the blocks specs with corrected weights, such as adamw+split8",
                UserWarning,
                stacklevel=3,
            )

    # -- stepping -------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. A closure is run once, with gradients enabled, and its result returned. With gradient release this
        steps the blocks that backward has not, and ends the step."""
        if torch.compiler.is_dynamo_compiling():  # a caller's torch.compile: the step is no graph of torch's operators
            return self._uncompiled_step(closure)
        # torch's wrapper, which calls hooks and labels profiles, costs 15 us of the host; training subscribes to
        # `after_step` instead, so that only a user's hooks and profilers take it.
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

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        """`step` without torch's hooks."""
        loss = self._update(closure)
        for subscriber in tuple(self.after_step):  # with gradients as the caller has them: some differentiate
            subscriber()
        return loss

    @torch.no_grad()
    def _update(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_params()
        if self.releaser is not None:  # most blocks were stepped in backward
            self.releaser.finish()
            self.num_steps += 1
            self._update_unseeded()
        elif self.registry.local_params:
            self.registry.set_local_gradients()
            try:
                self._step_all()
            finally:
                self.registry.drop_local_gradients()
        else:
            self._step_all()
        return loss

    def _step_all(self) -> None:
        """Steps all blocks, whose gradients are complete."""
        for subscriber in tuple(self.before_check):
            subscriber()
        _refuse_capture()
        unit = self.current_unit()
        options = self.options()  # before the check, which forgets what it found: this may raise
        masks = self.finite_check.check(unit, step=self.num_steps + 1, final=bool(self.before_step))
        if masks is None:
            return
        if self.before_step:
            for subscriber in tuple(self.before_step):
                subscriber.call()
            options = self.options()  # subscribers may have changed them
        if self._unseeded:
            self.seed(self.registry.live.values())
        inputs = self.inputs(masks, options=options, phase=self.num_steps + 1)
        for prepare in unit.prepares:
            prepare()
        self.num_steps += 1
        for backend in unit.backends:
            backend(inputs)
        for wait in unit.waits:
            wait()
        for slot in self.registry.slots_without_rows:  # other ranks' backends have counted
            if slot.param.grad is not None:
                self.registry.state[slot.param]["step"] += 1

    _hooked_step = Optimizer.profile_hook_step(_step)
    _uncompiled_step = torch._disable_dynamo(Optimizer.profile_hook_step(_step))  # pyright: ignore[reportPrivateImportUsage]

    def _check_params(self) -> None:
        """Adds parameters that were frozen and have a gradient now. Raises BadInputError if some were replaced."""
        registry = self.registry
        cleared = LiveState.num_cleared != registry.num_cleared
        if cleared or self.state is not registry.torch_state or getattr(self.state, "touched", True):
            registry.restart_absent(self.state)
            self._update_unseeded()
        try:  # lists compare by identity first, which is fast; comparing two distinct tensors may raise
            same = [group["params"] for group in self.param_groups] == registry.params_by_group
        except RuntimeError:
            same = False
        if not same:
            raise BadInputError(
                "the parameters in param_groups are not those that this optimizer has states of: add new ones with "
                "add_param_group, freeze those that are to rest, and build another optimizer where some were replaced"
            )
        if registry.frozen and any([param.grad is not None for param in registry.frozen]):
            self._add_late_params(registry.thawed_params(self.param_groups))

    def current_unit(self) -> StepUnit:
        """The StepUnit of this step: that of the last step, unless parameters or states have moved since."""
        registry = self.registry
        unit, sample = registry.unit, registry.sample_state
        if unit is None:
            self.warn_of_stalling(registry.live)  # weights may have been cast since
        # The checks of `BlockRegistry.step_unit`, so that a step in which nothing moved is read in one file less.
        if unit is None or registry.may_be_overwritten or not registry.placed:
            return registry.step_unit()
        if sample is not None and sample[0].get(sample[1]) is not sample[2]:
            return registry.step_unit()
        if any([backend.moved for backend in unit.backends]):  # a list is faster than a generator
            registry.drop_backends()
            return self.current_unit()
        return unit

    def seed(self, blocks: Iterable[LiveBlock]) -> None:
        """Initializes v of those `blocks` that wait for a gradient and have one now (`baoc.optim.seeding`)."""
        seeding.seed(blocks, registry=self.registry, param_groups=self.param_groups)
        self._update_unseeded()

    def last_backward(self) -> AbstractContextManager[None]:
        """`with optimizer.last_backward(): loss.backward()` lets backward step host-placed blocks already. Use it for
        the last one before `step`, if nothing clips, unscales or drops gradients between the two."""
        return self.overlap.last_backward()

    def options(self) -> list[Options]:
        """Settings of a step: one `Options` per parameter group, then one per entry of `BlockRegistry.tuned_options`.

        Raises BadInputError for a value outside AdamW's range, which a schedule may have set.
        """
        options = []
        for group in self.param_groups:
            lr, betas, eps, decay = float(group["lr"]), group["betas"], group["eps"], group["weight_decay"]
            first, second = betas
            if not (0 <= lr < inf and 0 <= decay < inf and eps > 0 and 0 <= first < 1 and 0 <= second < 1):
                groups.check_settings({**group, "lr": lr})  # raises
            options.append(Options(lr=lr, betas=betas, eps=eps, weight_decay=decay))
        for index, tuned in self.registry.tuned_options:
            group, betas = options[index], betas_of(tuned, self.param_groups[index])
            lr = group.lr * tuned.lr
            options.append(Options(lr=lr, betas=betas, eps=group.eps, weight_decay=group.weight_decay))
        return options

    def inputs(self, masks: Mapping[Tensor, Tensor], *, options: Sequence[Options], phase: int) -> StepInputs:
        """The backends' inputs in a step. `masks`: those of `finite_check`; `phase`: the step's number, from 1."""
        return StepInputs(
            state=self.registry.state, options=options, masks=masks, phase=phase, matching=self.rms_matching
        )

    @torch.no_grad()
    def mask_nonfinite(self) -> int | None:
        """Zeroes non-finite gradient elements before clipping, and returns their number. The coming step, which would
        check gradients itself otherwise, treats them as `nonfinite` says.

        The fused backend does not wait for the device, so this returns None. It marks the elements by -0.0, which
        scaling and clamping keep: add nothing to these gradients afterwards. With gradient release backward has masked;
        this then steps the blocks of which some parameters have no gradient.
        """
        _refuse_capture()
        self.registry.set_local_gradients()
        unit = self.registry.step_unit()
        if self.releaser is not None:
            self.releaser.flush()
            return None if unit.self_excluding else self.releaser.num_nonfinite
        self.overlap.check()
        num_masked = self.finite_check.mask(unit, step=self.num_steps + 1)
        # Masking changes the versions of gradients; blocks that were stepped had left out the same elements.
        versions = self.overlap.versions
        self.overlap.versions = {param: param.grad._version for param in versions if param.grad is not None}
        return num_masked

    def _check_between_steps(self, what: str) -> None:
        for stepper in filter(None, (self.releaser, self.overlap)):
            stepper.check_between_steps(what)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. The finite check also forgets what it found in these gradients."""
        for subscriber in self.before_zeroing:
            subscriber()
        if self.releaser is not None:
            self.releaser.check_zero_grad(set_to_none=set_to_none)
        self.overlap.check_between_steps("zero_grad was called")
        self.finite_check.forget(self.registry.all_backends)
        self.registry.drop_local_gradients()
        super().zero_grad(set_to_none)

    @property
    def nonfinite(self) -> str:
        return self.finite_check.policy

    @property
    def num_nonfinite(self) -> int:
        """Non-finite gradient elements found since this optimizer was built."""
        self.finite_check.read(self.registry.all_backends, step=self.num_steps + 1, wait=True)
        return self.finite_check.num_nonfinite

    @property
    def last_nonfinite(self) -> dict[str, int]:
        """Parameter name -> non-finite elements, at the last time that there were some."""
        self.finite_check.read(self.registry.all_backends, step=self.num_steps + 1, wait=True)
        return self.finite_check.last_nonfinite

    @property
    def num_skipped_steps(self) -> int:
        return self.finite_check.num_skipped_steps

    # -- blocks and bytes ------------------------------------------------------------------------------------------

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(live.block for live in self.registry.live.values())

    @property
    def specs(self) -> dict[str, str]:
        """Block name -> name of the spec it runs."""
        return {name: live.spec.name for name, live in self.registry.live.items()}

    def block_state_bytes(self) -> dict[str, int]:
        """Block -> live bytes of its optimizer state on the device, steps and matching factors included."""
        return {name: self.registry.block_bytes(live) for name, live in self.registry.live.items()}

    def block_host_bytes(self) -> dict[str, int]:
        """Block -> live bytes of its optimizer state on the host; 0 unless it is host-placed."""
        return {name: self.registry.block_host_bytes(live) for name, live in self.registry.live.items()}

    def state_bytes(self) -> int:
        return sum(self.block_state_bytes().values())

    # -- changing it ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def retune(self, tuning: Tuning | None) -> None:
        """Sets learning rates and betas by rule and role, of present and late blocks, from the next step on."""
        if tuning == self.registry.tuning:
            return
        self._tunes_betas = tuning is not None and bool(tuning.betas)
        for group in self.param_groups if self._tunes_betas else ():
            group.setdefault(FIRST_BETAS, group["betas"])
        self.registry.retune(tuning, param_groups=self.param_groups)

    def migrate(
        self, specs: Mapping[str, str | OptimizerSpec], *, moments: Mapping[str, Moments] | None = None, why: str = ""
    ) -> list[BlockMove]:
        """Moves blocks to other specs; states are inherited (docs/methods.md#state-inheritance), other blocks stay.

        `moments` (by parameter name) initialize v if a block had none. Nothing changes if any of `specs` is refused.
        Blocks move one by one, those that shrink first, so memory exceeds the larger plan by one block at most.
        """
        self.changes_with.meet("migrate()")
        live, targets, params = self.registry.live, [], groups.named_params(self.param_groups)
        for name, spec_or_name in specs.items():
            if name not in live:
                raise unknown_name(name, what="block", allowed=live)
            spec = groups.resolve_spec(spec_or_name)
            groups.check_applies(spec, block=live[name].block)
            if spec != live[name].spec:
                targets.append(self.registry.make_block(live[name].block, spec=spec, params=params))
        self._check_between_steps("migrate was called")
        check_new_blocks(targets)
        self.registry.checksum_weights()  # until the next step it is known which split weights are overwritten
        self.registry.drop_stale_corrections()
        targets.sort(key=lambda target: migration.device_growth(target, source=live[target.block.name]))
        self.registry.refresh(self.param_groups)  # backends refer to states that are to be freed
        moves: dict[str, BlockMove] = {}
        with self.finite_check.keep_checked_through_casts():
            for target in targets:
                moves[target.block.name] = migration.migrate_block(
                    target,
                    registry=self.registry,
                    param_groups=self.param_groups,
                    moments=moments or {},
                    before_first_step=self.num_steps == 0,
                    why=why,
                )
        self.registry.refresh(self.param_groups)
        self._update_unseeded()
        self.warn_of_stalling(moves)
        return [moves[name] for name in live if name in moves]

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """States by parameter name, groups, and the spec of every block; see `optim.checkpoint`."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self._check_between_steps("state_dict was called")
        state = checkpoint.save(self.registry, param_groups=self.param_groups, num_steps=self.num_steps)
        if self.releaser is not None:
            state["release"] = self.releaser.state_dict()
        for hook in self._optimizer_state_dict_post_hooks.values():
            state = hook(self, state) or state
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads BAOC's own or torch.optim.AdamW's checkpoint by parameter name, converted to the specs in force.

        `load_report` then says what was converted, with which error, and which names were on one side only. Load the
        model first: its checkpoint has the weights, and this one only the corrections of split ones. Raises
        CheckpointError before anything is changed.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        names, among = [name for group in self.param_groups for name in group["param_names"]], self.changes_with
        among.meet("load_state_dict()")
        saved = among.run_or_raise_on_all(lambda: checkpoint.read(state_dict, names=names))
        told = {"keys": sorted(map(str, state_dict)), "num_steps": saved.num_steps}
        told["specs"] = {name: spec.name for name, spec in saved.specs.items()}
        check_same_on_ranks({"checkpoint": told}, among=among)
        self.load_report = loading.load(
            saved,
            registry=self.registry,
            param_groups=self.param_groups,
            among=among,
            checked=lambda: self._resume(state_dict),
        )
        self.num_steps, self.registry.may_be_overwritten = saved.num_steps, True
        if self.releaser is not None:
            self.releaser.load_state_dict(state_dict.get("release"))
        self._update_unseeded()
        self.registry.refresh(self.param_groups)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    @property
    def changes_with(self) -> Ranks:
        """The ranks that load a checkpoint, move blocks and add parameters together."""
        return ranks() if self.registry.local_params else SINGLE_PROCESS

    def _resume(self, state_dict: dict[str, Any]) -> None:
        """For subclasses: takes more from a checkpoint, once it is checked and before states are filled."""

    @torch.no_grad()
    def to_adamw_state_dict(self) -> dict[str, Any]:
        """A state dict for torch.optim.AdamW over the same groups; states that a rule does not keep are inferred."""
        return checkpoint.to_adamw(self.registry, param_groups=self.param_groups)

    @torch.no_grad()
    def export_weights(self) -> dict[str, Tensor]:
        """Name -> fp32 copy on the CPU of every parameter, corrections added: what a model without BAOC loads. Sharded
        ones are gathered on all ranks."""

        def copy(master: Tensor) -> Tensor:
            return master.detach().to("cpu", torch.float32, copy=True)

        self.registry.drop_stale_corrections()
        values: dict[Tensor, Tensor] = {}
        for live in self.registry.live.values():
            with self.registry.states_on_device(live, write_back=False):
                for slot in live.slots:
                    master = weights.master(slot.param, self.registry.state[slot.param])
                    values[slot.group_param] = copy(master if slot.shard is None else slot.shard.all_gather(master))
        params = groups.named_params(self.param_groups).items()
        return {name: values[param] if param in values else copy(unsharded(param)) for name, (param, _) in params}

    @torch.no_grad()
    def load_weights(self, values: Mapping[str, Tensor]) -> None:
        """Sets parameters by name to fp32 (or other) values, in the weights format of their blocks. Raises
        BadInputError for an unknown name or another shape, with nothing changed."""
        params, registry = groups.named_params(self.param_groups), self.registry
        for name, value in values.items():
            if name not in params:
                raise unknown_name(name, what="parameter", allowed=params)
            if value.shape != (shape := tuple(params[name][0].shape)):
                raise BadInputError(f"{name} has shape {shape}, the given weights have {tuple(value.shape)}")
        slots = {slot.group_param: (live, slot) for live in registry.live.values() for slot in live.slots}
        for name, value in values.items():
            param = params[name][0]
            live, slot = slots.get(param, (None, None))
            if (shard := shard_of(param)) is not None:
                value = shard.local_part(value, shape=local_shard(param).shape)
            if live is None or slot is None or slot.weights == "native":
                (local_shard(param) if slot is None else slot.param).copy_(value)
                continue
            with registry.states_on_device(live):
                weights.store_in_pieces_(
                    slot.param, registry.state[slot.param], value.to(torch.float32), weights=slot.weights, name=name
                )
            if slot.weight_checksum is not None:
                slot.weight_checksum = weights.checksum(slot.param)

    # -- copies ---------------------------------------------------------------------------------------------------

    def __copy__(self) -> "BlockwiseOptimizer":
        raise TypeError("a shallow copy would step the same parameters and states as well: use copy.deepcopy")

    def __getstate__(self) -> dict[str, Any]:
        self.registry.synchronize()
        states = {  # each tensor as a storage of its own: pickle would write a whole slab for each of its views
            param: {k: with_own_storage(v) if isinstance(v, Tensor) else v for k, v in state.items()}
            for param, state in self.registry.state.items()
        }
        torchs_own = ("_optimizer_", "_warned", "_zero_grad")
        own = {k: v for k, v in vars(self).items() if not k.startswith(torchs_own) and k not in _LEFT_OUT_OF_COPIES}
        return {**own, "state": defaultdict(dict, states)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_registry" not in state:  # optimizer.__setstate__({"state": ...}), by which some start states afresh
            vars(self).update(state)
            return
        no_subscribers = {"before_zeroing": [], "before_check": [], "before_step": [], "after_step": []}
        super().__setstate__({**state, **no_subscribers, "late_planner": None, "network": None})
        self.overlap = KeepGradients(self)
        self.state = LiveStates(dict, self.state)
        if self._registry is not None:
            self._registry.adopt(self.state)
        if self.releaser is not None:
            self.releaser.adopt(self)


def _refuse_capture() -> None:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise BadInputError(
            "a CUDA graph cannot capture the step: a replay would not count it, nor see another learning rate. "
            "Capture forward and backward alone; the step replays a graph of its own"
        )
