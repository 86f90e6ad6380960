"""BaocOptimizer: a budgeted optimizer for a plain PyTorch loop, built like any torch optimizer.

The loop stays as it is; the optimizer plans when it is built, samples gradients inside `step()`, and reallocates there.
"""

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from baoc.config.schema import ReallocationConfig
from baoc.core.budgets import parse_budget, resolve_auto
from baoc.core.catalogue import SPECS, device_spec_name
from baoc.errors import BadInputError
from baoc.optim import BlockwiseOptimizer, GradientRelease
from baoc.optim.backward import detach_other_releases
from baoc.optim.groups import (
    check_names,
    check_settings,
    check_tensor,
    is_placeholder_name,
    members_of,
    raw_groups,
    to_plain,
)
from baoc.optim.shards import is_sharded, warm_up_communicator
from baoc.optim.wrappers import has_averaged_copy, live_instances, watch_loads
from baoc.parallel import SINGLE_PROCESS, Ranks, check_same_on_ranks, ranks, refuse_several_processes, unwrapped
from baoc.profiling import cap_device, describe, free_bytes
from baoc.profiling.bf16_params import cast_to_bf16
from baoc.profiling.caller_probe import CallerProbe
from baoc.tracking.console import say
from baoc.training.arriving_weights import move_to_host, needs_room
from baoc.training.measure.first_step import FirstStep
from baoc.training.narration import Narrator
from baoc.training.own_words import in_own_words
from baoc.training.session import (
    RecipeLike,
    Session,
    SessionSettings,
    bf16_weight_specs,
    confirms,
    largest_shards,
    make_profiler,
    refuse_sharded,
    with_recipe,
    without_scratch_measurements,
)
from baoc.training.user_optimizer import (
    check_switches,
    groups_of,
    hyperparameters,
    shared_by_ranks,
    widened,
    without_bf16,
)
from baoc.types import Budget, Plan
from baoc.units import format_bytes

PLAIN_WARMUP_STEPS = 100
log = logging.getLogger(__name__)


class BaocOptimizer(BlockwiseOptimizer):
    """AdamW with a budget: the planner chooses the spec of every block, and chooses again after the warm-up.

    `plan` is the plan in force. `lr`, `betas`, `eps` and `weight_decay` are those of `torch.optim.AdamW`.

    In a process group all ranks build, step and save it together, over DistributedDataParallel. Rank 0 plans, by the
    measurement of the rank that needs most, and makes each later decision.

    Args:
        params: A module, named parameters, plain parameters, or groups of either. The network of plain parameters is
            looked for among the modules that live, so that plan and checkpoints are the same as of the module.
        budget: A budget in any spelling of the command line: "8gb", "state_25", "auto".
        probe: Runs one forward and backward pass on a typical batch, or returns its loss, so that limits on memory and
            time are planned before training. Without it the first step runs on the plan of least state and measures its
            memory, outside of the cap; a limit on time needs it.
        checkpointing: How many layers recompute their activations in backward: True, False, the number of the first
            ones, or "auto" for the fewest with which the plan is as good as with all, which needs a probe. None leaves
            the network as it is.
        model: The network of which `params` are, where these are no module: names, roles and blocks are then its own.
        verbose: Print the plan, each move, and at the end whether the budget held.
        settings: Planner, reallocation and optimizer settings. The default warm-up is 100 steps.
        recipe: A recipe by name or file, or a `Recipe`: what each role runs, in place of the planner's choice.
        release: Step each block in the backward pass and drop its gradients, see BlockwiseOptimizer. None takes
            the value in `settings`.
        pretrained: Whether weights are pretrained, or adapters: nothing was measured of these, so no learning rate is
            raised. None asks the network, which tells what `from_pretrained` and peft made; a loaded state dict leaves
            no trace.
        switches: `fused`, `foreach` and `capturable` of `torch.optim.AdamW` have no effect. `amsgrad`, `maximize` and
            `differentiable` are refused where they are true.

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
        checkpointing: bool | int | Literal["auto"] | None = None,
        model: nn.Module | None = None,
        pretrained: bool | None = None,
        verbose: bool = True,
        **switches: bool | None,
    ):
        check_switches(switches, door=BaocOptimizer)
        default = SessionSettings(reallocation=ReallocationConfig(warmup_steps=PLAIN_WARMUP_STEPS))
        settings = default if settings is None else settings
        settings = with_recipe(settings, recipe=recipe, release=release, checkpointing=checkpointing)
        process_group = ranks()
        averaged = process_group is not SINGLE_PROCESS  # gradients, by DistributedDataParallel
        if not averaged:
            refuse_several_processes("optimizer")
        params = unwrapped(params)
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_settings({key: to_plain(value) for key, value in options.items()})
        module, named, groups = with_network(params, model=unwrapped(model))
        pairs = [pair for group in groups for pair in group["params"]]
        device = next((p.device for p in named.values()), torch.device("cpu"))
        given = shared_by_ranks(
            params=dict(pairs),
            groups=[{**options, **group} for group in groups],
            settings=settings,
            budget=(limit := parse_budget(budget)),
            probe="given" if probe is not None else "missing",
            pretrained=pretrained,
        )
        check_same_on_ranks(given, among=process_group)
        detach_other_releases([param for _, param in pairs])  # their hooks would step in the probe
        _broadcast_unsharded([param for _, param in pairs], group=process_group, device=device)
        free = -int(process_group.all_reduce_max(-free_bytes(device))[0])
        limit = resolve_auto(limit, free_bytes=free)
        given = isinstance(params, nn.Module) or model is not None
        whole = None if given else network_of((param for _, param in pairs), largest=True)
        infos = describe(module if module is not None else pairs, optimizer_groups=groups, part_of=whole)
        settings = without_scratch_measurements(settings, network=module, pretrained=pretrained)
        refuse_sharded(named, budget=limit, settings=settings, probed=probe is not None)
        if limit.step_time is not None and probe is None:
            raise BadInputError(
                f"budget.step_time={limit.step_time:g} needs seconds of a step before training: give probe=, a "
                "callable that runs one forward and backward, or leave step_time out"
            )
        plans_after_a_step = limit.memory_bytes is not None and probe is None
        in_bf16 = all(param.dtype == torch.bfloat16 for param in named.values())
        settings = widened(settings, device=device.type, budget=limit, precision="bf16-true" if in_bf16 else "32-true")
        if bf16_weight_specs(settings.planner) and has_averaged_copy(named):
            settings = without_bf16(settings, because=["AveragedModel"])
        session = Session(
            infos if limit.memory_bytes is None else largest_shards(infos, params=named),
            params=named,
            budget=limit,
            settings=settings,
            betas=betas,
            device=device,
            module=module,
            ranks=process_group,
        )
        first_step = FirstStep(session) if plans_after_a_step else None
        if first_step is None:
            cap_device(device, budget=limit)
        try:
            if probe is None:
                session.set_recomputed_layers()
                session.assume()
            else:
                source = module if module is not None else [param for _, param in pairs]
                looks = confirms(device)
                measure_and_plan(session, CallerProbe(probe, source=source, averaged=averaged, looks=looks))
            from_host = needs_room(session.plan, footprint=session.planner.footprint)
            if from_host:
                move_to_host(session.bf16_params)
            super().__init__(groups, **session.arguments(), device=device if from_host else None, **options)
            if module is not None:
                watch_loads(module, self.registry)
                self.network = weakref.ref(module)
        except BaseException:
            if first_step is not None:
                first_step.close()
            raise
        self.reallocator = session.reallocator(weakref.proxy(self))
        self.narrator = Narrator(self.reallocator, name="BaocOptimizer", verbose=verbose, device=device)
        self.narrator.layers_summary = session.layers_summary
        self._settings = settings
        self._first_step = first_step  # None once it is measured
        if first_step is not None:
            first_step.begin(self.reallocator, owner=self)
            self.after_step.append(partial(BaocOptimizer._learn_footprint, weakref.proxy(self)))
        _warn_of_others(self, budget=limit)
        self.reallocator.attach()
        weakref.finalize(self, self.narrator.conclude)  # a plain loop does not say its end
        self._checks_copies = limit.memory_bytes is not None and probe is not None and averaged
        self.after_step.append(partial(_warn_of_copies, weakref.proxy(self)))
        if plans_after_a_step and verbose:
            say(f"BaocOptimizer: budget {limit.name} is planned for after the first step, which measures its memory")
        else:
            self.narrator.begin()

    @classmethod
    def from_optimizer(
        cls, optimizer: torch.optim.Optimizer, model: nn.Module | None = None, **arguments: Any
    ) -> "BaocOptimizer":
        """The budgeted optimizer in the place of a `torch.optim.AdamW` that somebody else's code built.

        Groups with all their keys, lr, betas, eps and weight_decay are `optimizer`'s, and its states where it has
        stepped. Build learning-rate schedules on what this returns.

        Args:
            optimizer: AdamW, or Adam without weight decay.
            model: The network: names, roles and blocks are its own.
            arguments: Those of BaocOptimizer, beside the four that `optimizer` says.
        """
        said = "BaocOptimizer.from_optimizer was given"
        defaults = hyperparameters(optimizer, said=said)
        if twice := sorted(set(arguments) & set(defaults)):
            raise BadInputError(f"{twice[0]} is given beside an optimizer that says it: leave it out")
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            raise BadInputError(
                f"{said} an optimizer that a learning-rate schedule is built on, which would go on moving that one's "
                "rate: build the schedule afterwards, on the optimizer that from_optimizer returns"
            )
        ours = cls(groups_of(optimizer), model=model, **{**defaults, **arguments})
        if optimizer.state:
            ours.load_state_dict(optimizer.state_dict())
        return ours

    @property
    def plan(self) -> Plan:
        return self.reallocator.plan

    @property
    def budget_met(self) -> bool | None:
        """True if the limit on memory or state holds so far; None without such a limit, or if no peak is known. On a
        CPU it is the first step's, and none is known if another optimizer has a memory budget too."""
        return self.narrator.budget_met

    def summary(self) -> str:
        """The plan in force as a table by role and spec, with totals, and state and peak beside the budget."""
        return self.narrator.summary()

    @in_own_words
    def _learn_footprint(self) -> None:
        if self._first_step is not None and self.reallocator.has_gradients:
            first_step, self._first_step = self._first_step, None
            first_step.learn(self.reallocator)
            self.narrator.first_step_bytes = first_step.peak_bytes

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, with the reallocator's under `online`."""
        return {**super().state_dict(), "online": self.reallocator.state_dict()}

    @property
    def changes_with(self) -> Ranks:
        return self.reallocator.ranks

    def _resume(self, state_dict: dict[str, Any]) -> None:
        """Adopts the saved allocation if it meets the budget; the states follow, converted where specs differ."""
        if (online := state_dict.get("online")) is not None:
            self._changed = self.reallocator.load_state_dict(online, blocks=state_dict.get("blocks"))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state as torch does, and reports what was planned or converted anew."""
        self._changed: list[str] | None = None
        super().load_state_dict(state_dict)
        if self._changed is not None and self.load_report is not None:
            self.narrator.resumed()
            self.reallocator.report_resume(self.load_report.moves, notes=self._changed)

    # -- copies, made together with the model: its parameters are then the copy's -----------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if self._first_step is not None:
            raise TypeError(
                "this BaocOptimizer measures the memory of its first step, so it cannot be copied or pickled before "
                "that: take a step first, or build it with probe="
            )
        profiler = self.reallocator.profiler
        return {**super().__getstate__(), "_profiled": profiler.state_dict() if profiler is not None else {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_registry" not in state:
            return
        profiled = vars(self).pop("_profiled")
        planner = self.reallocator.planner
        planned = {param.name for block in planner.blocks for param in block.params}
        named = {name: param for param, name in self.registry.names.items() if name in planned}
        if profiled:
            profiler = make_profiler(planner, named, settings=self._settings, betas=self.defaults["betas"])
            assert profiler is not None
            profiler.load_state_dict(profiled)
            self.reallocator.profiler = profiler
        self.reallocator.optimizer = weakref.proxy(self)
        self.reallocator.attach()


_limited = threading.local()  # `optimizers`: those of a thread that have a memory budget


def _warn_of_others(new: Any, *, budget: Budget) -> None:
    """Warns if another optimizer has a memory budget on this device too, as no plan and no first step counts both."""
    if budget.memory_bytes is None:
        return
    device, mine = new.narrator.device, new.registry.names.keys()
    limited: weakref.WeakSet[Any] = vars(_limited).setdefault("optimizers", weakref.WeakSet())

    def find_others() -> list[Any]:
        near = [other for other in limited if other.narrator.device == device]
        return [other for other in near if mine.isdisjoint(other.registry.names)]  # else this one takes its place

    if find_others():
        gc.collect()  # that of a finished loop may be garbage
    if others := find_others():
        log.warning(
            "another BaocOptimizer has a memory budget on this %s too, and each plans for the whole of its budget as "
            "if alone: build one over the parameter groups of both modules, or give each its part of the budget",
            device.type,
        )
        for one in (new, *others):
            one.narrator.alone = False
    limited.add(new)


def _broadcast_unsharded(params: Sequence[Tensor], *, group: Ranks, device: torch.device) -> None:
    """Gives all ranks rank 0's values, from which states start and of which some hold the last bits."""
    unsharded = [param for param in params if not is_sharded(param)]
    if len(unsharded) < len(params):
        warm_up_communicator(device)
    group.broadcast_tensors(unsharded)


def _warn_of_copies(optimizer: Any) -> None:
    """After the first step: warns if DistributedDataParallel keeps gradients twice, which no plan counts."""
    if not optimizer._checks_copies:
        return
    optimizer._checks_copies = False
    mine = {param for group in optimizer.param_groups for param in group["params"]}
    for wrapper in live_instances(DistributedDataParallel):
        if not wrapper.gradient_as_bucket_view and not mine.isdisjoint(wrapper.parameters()):
            num_bytes = sum(param.nbytes for param in wrapper.parameters() if param.requires_grad)
            log.warning(
                "DistributedDataParallel keeps a second copy of the gradients (%s), which the budget does not count: "
                "build it with gradient_as_bucket_view=True",
                format_bytes(num_bytes),
            )


def measure_and_plan(session: Session, probe: CallerProbe) -> None:
    """Measures and plans; if the plan keeps bf16 weights, runs the probe with them too, so that it fails now if it can:
    layers accept them under bf16 autocast only. Raises BadInputError if the probe does not enter that."""
    try:
        session.measure(probe)
        chosen = map(device_spec_name, session.plan.allocation.choices.values())
        if any(SPECS[name].weights != "native" for name in chosen):
            with cast_to_bf16(session.bf16_params, module=session.module):
                probe.footprint(context_bytes=session.context_bytes, released=session.released)
    except RuntimeError as error:
        if not session.bf16_params or "dtype" not in str(error):
            raise
        specs = [spec.name for spec in bf16_weight_specs(session.settings.planner)]
        raise BadInputError(
            f"the catalogue has specs with bf16 weights ({', '.join(specs[:3])}, ...), but the probe's layers get "
            f"inputs of another type ({str(error).splitlines()[0]}): run forward under torch.autocast(..., "
            "dtype=torch.bfloat16), in the probe and in the loop, or leave these specs out"
        ) from error


def with_network(
    params: Any, *, model: nn.Module | None
) -> tuple[nn.Module | None, dict[str, Tensor], list[dict[str, Any]]]:
    """The network, given or found, its parameters by name, and their groups."""
    if model is not None and not isinstance(model, nn.Module):
        raise BadInputError(f"model is a {type(model).__name__}: give the torch.nn.Module that has the parameters")
    module = params if model is None and isinstance(params, nn.Module) else model
    named, groups = name_parameters(params, model=model)
    if module is None:
        pairs = [pair for group in groups for pair in group["params"]]
        found = network_of(param for _, param in pairs)
        names = {} if found is None else {id(param): name for name, param in found.named_parameters()}
        if all(is_placeholder_name(name) or name == names.get(id(param)) for name, param in pairs):
            module = found
            named, groups = name_parameters(groups, model=module)
    return module, named, groups


def network_of(params: Iterable[Tensor], *, largest: bool = False) -> nn.Module | None:
    """The smallest (or largest) live module that has all of these parameters; None where there is none. Names and
    layers, by which roles, measured recipes and checkpoints go, are not in `model.parameters()`."""
    wanted = set(map(id, params))
    built = [module for module in live_instances(nn.Module) if "_modules" in module.__dict__]  # by nn.Module.__init__
    found = [module for module in built if wanted <= set(map(id, module.parameters()))]
    return (max if largest else min)(found, key=lambda module: sum(1 for _ in module.modules()), default=None)


def name_parameters(params: Any, *, model: nn.Module | None = None) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Any spelling of parameters -> trainable ones by name, and groups of (name, parameter) pairs, frozen ones too.
    Names are the `model`'s; without it, plain parameters are named `param0`, `param1`, ... in order. Raises
    BadInputError where nothing is trainable, where two are called the same, and where one is not the model's."""
    names = {} if model is None else {id(param): name for name, param in model.named_parameters()}
    groups = [dict(group) for group in raw_groups(params)]
    entries: list[tuple[int, str, Tensor]] = []
    for index, group in enumerate(groups):
        first = len(entries)
        for given, param in members_of(group, index=index):
            name = f"param{len(entries)}" if given is None else given
            check_tensor(param, name=name)
            if model is not None and id(param) not in names:
                raise BadInputError(
                    f"{name} of shape {tuple(param.shape)} is no parameter of the model ({type(model).__name__}) that "
                    "was given: give the model that the optimizer trains"
                )
            entries.append((index, names.get(id(param), name), param))
        group.pop("param_names", None)
        group["params"] = [(name, param) for _, name, param in entries[first:]]
    check_names(entries)
    named = {name: param for _, name, param in entries if param.requires_grad}
    if not named:
        raise BadInputError("no trainable parameter was given: pass a module, model.parameters() or parameter groups")
    return named, groups
