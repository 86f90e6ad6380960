"""`advise`: how to run a global batch within a budget, for users with their own loader and training loop.

It runs the search of `run.py` (`training.measure.microbatch_search`), which tries a few small micro-batches, plans
every way to run the batch, and tries the best of these itself.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, cast

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from baoc.callbacks.generators import capture_rng, restore_rng
from baoc.config.resolve import SEARCHED_PRECISIONS, choose_device
from baoc.config.schema import ModelConfig, OptimConfig, RunConfig, TaskConfig
from baoc.config.trainer_arguments import TrainerConfig
from baoc.config.validate import require
from baoc.core import own_code
from baoc.core.budgets import parse_budget
from baoc.data.base import DataModule
from baoc.data.batches import BatchFactory, tensors_in
from baoc.errors import BadInputError
from baoc.models.switches import is_compiled, recomputable_layers, set_recomputed
from baoc.optim.groups import check_settings, to_plain
from baoc.planning.microbatch import OBJECTIVES
from baoc.tasks.base import Task
from baoc.tasks.settings import OptimizerSettings
from baoc.training.measure.microbatch_search import decide
from baoc.training.measure.probe import silent
from baoc.training.plain_loop import BaocOptimizer
from baoc.training.session import RecipeLike, SessionSettings, with_recipe, without_scratch_measurements
from baoc.training.user_optimizer import check_arguments
from baoc.types import Budget, OwnDataSpec
from baoc.units import format_bytes

LONG = 10_000  # assumed steps of the run: enough to be worth a careful decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to run: `accumulation` micro-batches of `micro_batch` samples per step, with the activations of the first
    `recomputed` layers recomputed in backward, and the optimizer that `optimizer()` builds.

    `peak_bytes` and `samples_per_s` are predictions for this option, which the search has tried itself.
    """

    micro_batch: int
    accumulation: int
    recomputed: int
    budget: Budget
    peak_bytes: int
    state_bytes: int
    samples_per_s: float
    model: nn.Module = field(repr=False)
    layers: Sequence[nn.Module] = field(repr=False)
    probe: Callable[[], Tensor] = field(repr=False)
    settings: SessionSettings = field(repr=False)

    def recompute(self) -> int:
        """Switches on activation checkpointing for the first `recomputed` layers; returns their number."""
        if self.recomputed:
            with _declared(self.model, self.layers):
                set_recomputed(self.model, self.recomputed)
        return self.recomputed

    def optimizer(self, params: Any = None, **options: Any) -> BaocOptimizer:
        """Builds the BaocOptimizer for this micro-batch, of the network or its groups; call `recompute` before."""
        defaults: dict[str, Any] = {"budget": self.budget, "probe": self.probe, "settings": self.settings}
        defaults |= {"model": self.model, "pretrained": self.settings.planner.family is None}
        return BaocOptimizer(self.model if params is None else params, **{**defaults, **options})

    def __str__(self) -> str:
        layers = f", activations of {self.recomputed} layers recomputed" if self.recomputed else ""
        return (
            f"{self.accumulation} x {self.micro_batch} samples a step{layers}: peak {format_bytes(self.peak_bytes)}, "
            f"about {self.samples_per_s:.3g} samples/s (predicted) within budget {self.budget.name}"
        )


def advise(
    model: nn.Module,
    make_batch: Callable[[int], Any],
    loss: Callable[[Any, Any], Tensor] | None = None,
    *,
    batch_size: int,
    budget: str | int | Mapping[str, Any] | Budget = "auto",
    precision: str = "32-true",
    objective: str = "quality",
    layers: Sequence[nn.Module] | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    device: str | int | torch.device | None = None,
    settings: SessionSettings | None = None,
    recipe: RecipeLike | None = None,
    pretrained: bool | None = None,
    **unknown: Any,
) -> Advice:
    """Micro-batch, accumulation, recomputation and optimizer for `batch_size` samples a step within `budget`.

    Afterwards the network, its device and gradients, and the random generators are as before. Layers that
    `baoc.set_compiled(model)` compiles are looked at so; where compiling them fails they are compiled no more.
    `Advice.recompute` and `Advice.optimizer` apply the advice.

    Args:
        make_batch: Returns a batch of the given number of samples, as `loss` takes it. It is moved to the device.
        loss: Returns the mean loss of (model, batch). None calls `training_step(batch, 0)` of a LightningModule.
        batch_size: Samples per optimizer step, all micro-batches together.
        precision: `32-true` or `bf16-mixed`, as a Lightning Trainer's; the search runs `loss` under its autocast.
        objective: What is preferred among options that fit: `quality`, `throughput` or `balanced`.
        layers: Modules whose activations may be recomputed. None takes `model.checkpoint_units`, else the repeated
            layers, as `checkpointing=` of BaocOptimizer does.
        device: Where the network will be trained, a number being a GPU's; None is a GPU if there is one.
        pretrained: Whether weights are pretrained, or adapters; see BaocOptimizer.

    Raises:
        BadInputError: An argument is not allowed, `make_batch` or `loss` raises, `loss` returns no tensor of one
            number, or a BatchNorm is in training mode.
        InfeasibleBudgetError: No option fits; the message names the least budget.
    """
    check_arguments(unknown, advise)
    if not isinstance(model, nn.Module):
        raise BadInputError(f"advise was given a {type(model).__name__} as its network: pass a torch.nn.Module")
    if not callable(make_batch):
        raise BadInputError(
            f"make_batch is a {type(make_batch).__name__}: pass a function that makes a batch of as many samples as it "
            "is told"
        )
    if loss is None and not isinstance(model, L.LightningModule):
        raise BadInputError("advise needs a loss: a function of (model, batch) that returns the mean loss")
    require(precision in SEARCHED_PRECISIONS, "precision", precision, " or ".join(SEARCHED_PRECISIONS))
    if not any(param.requires_grad for param in model.parameters()):
        raise BadInputError(f"the model ({type(model).__name__}) has no parameters to train")
    counts = isinstance(batch_size, Integral) and not isinstance(batch_size, bool) and batch_size >= 1
    require(counts, "batch_size", batch_size, "1 or more samples a step, a whole number")
    require(objective in OBJECTIVES, "objective", objective, f"one of {', '.join(OBJECTIVES)}")
    split = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training]
    if split:
        raise BadInputError(
            f"{split[0]} is a BatchNorm, whose statistics are of one micro-batch, so that another one trains another "
            "network: set such layers to eval(), or take norms without statistics of the batch"
        )
    check_settings({"lr": 0.0, "eps": 1e-8, "weight_decay": 0.0, "betas": (betas := to_plain(betas))})
    asked = "auto" if device is None else f"cuda:{device}" if type(device) is int else str(device)
    kind, colon, index = asked.partition(":")
    kind = choose_device(kind)
    exists = not colon or index in map(str, range(torch.cuda.device_count() if kind == "cuda" else 1))
    require(kind in ("cpu", "cuda") and exists, "device", asked, "cpu or cuda, or cuda:INDEX of a GPU that is there")
    where = torch.device(kind + colon + index)
    given = SessionSettings() if settings is None else settings
    settings = with_recipe(given, recipe=recipe, objective="" if objective == RunConfig().objective else objective)
    settings = without_scratch_measurements(settings, network=model, pretrained=pretrained)
    checkpoint_layers = recomputable_layers(model) if layers is None else _checked_layers(layers, model=model)
    names = [name for name, part in model.named_modules() if any(part is layer for layer in checkpoint_layers)]
    config = RunConfig(
        name="advise",
        batch_size=int(batch_size),
        micro_batch="auto",
        objective=cast(Any, objective),
        budget=parse_budget(budget),
        model=ModelConfig(
            name=type(model).__name__, checkpointing=None if checkpoint_layers else False, compile=is_compiled(model)
        ),
        optim=OptimConfig(betas=betas, release_gradients=False),
        trainer=TrainerConfig(max_steps=LONG, precision=cast(Any, precision), enable_progress_bar=False),
        task=TaskConfig(
            name="own", options={"told_by": _source_hash(loss, make_batch, settings, names)}
        ),  # keys a decision
    )
    step: Any = model.training_step if loss is None else loss
    make = own_code.with_faults(make_batch, key="make_batch")
    run = own_code.with_faults(step, key="training_step" if loss is None else "loss")
    task = _UserTask(model, run=run, is_own_step=loss is None, betas=betas)
    with ExitStack() as stack, TemporaryDirectory() as folder:
        if where.type == "cuda":
            stack.enter_context(torch.cuda.device(where))  # the search measures on the current one
        stack.callback(restore_rng, capture_rng(where))
        sample = make(1)
        if sample is None:
            raise BadInputError("make_batch(1) returned None: return the batch, in the form that the loss takes")
        shapes = [tensor.shape for tensor in tensors_in(sample)]
        if batch_size > 1 and shapes and shapes == [tensor.shape for tensor in tensors_in(make(2))]:
            raise BadInputError(
                "make_batch(1) and make_batch(2) have equal shapes: it must make a batch of as many samples as it is "
                "told. Where a batch is a fixed number of tokens, let a sample be one row of so many"
            )
        data = _OneBatch(BatchFactory(make))
        stack.enter_context(_unchanged(model))
        stack.enter_context(_declared(model, checkpoint_layers))
        stack.callback(set_recomputed, model, 0)
        try:
            chosen = decide(config, task=task, data=data, device=where.type, settings=settings, run_dir=Path(folder))
        except BadInputError as error:
            raise error.with_traceback(None) from error.__cause__  # without the search's frames
    option = chosen.option
    probe = partial(
        _probe, task=task, make_batch=make_batch, micro_batch=option.micro_batch, bf16=precision == "bf16-mixed"
    )
    return Advice(
        micro_batch=option.micro_batch,
        accumulation=option.accumulation,
        recomputed=option.recomputed,
        budget=chosen.config.budget,
        peak_bytes=option.peak_bytes,
        state_bytes=option.state_bytes,
        samples_per_s=option.samples_per_s,
        model=model,
        layers=tuple(checkpoint_layers),
        probe=probe,
        settings=settings,
    )


class _UserTask(Task):
    """The user's network and loss as the Task that the search takes. It validates nothing."""

    quality: ClassVar[tuple[str, bool]] = ("val/loss", False)

    def __init__(self, model: nn.Module, *, run: Callable[..., Any], is_own_step: bool, betas: tuple[float, float]):
        super().__init__(model, optimizer=OptimizerSettings(betas=betas))
        self._run, self._is_own_step = run, is_own_step  # the model's own training_step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with silent(cast(Any, self.model)) if self._is_own_step else nullcontext():
            out = self._run(batch, batch_idx) if self._is_own_step else self._run(self.model, batch)
        loss: Any = out.get("loss") if isinstance(out, Mapping) else out
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
            raise BadInputError(
                f"the loss returned a {type(out).__name__}{shape}: it must return a tensor of one number, the mean "
                "over the batch"
            )
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        return None


class _OneBatch(DataModule):
    def __init__(self, batch: BatchFactory):
        super().__init__(batch_size=1)
        self._batch = batch
        self.spec = OwnDataSpec(dataset="own", num_train=1, num_val=0)

    def make_train_loader(self, *, limit: int | None) -> Any:
        return [self._batch]

    def make_overfit_loader(self) -> Any:
        return [self._batch]

    def val_dataloader(self) -> Any:
        return []


def _probe(*, task: _UserTask, make_batch: Callable[[int], Any], micro_batch: int, bf16: bool) -> Tensor:
    """BaocOptimizer's `probe`: the loss of a forward pass on the chosen micro-batch."""
    device = next(task.model.parameters()).device
    batch = task.transfer_batch_to_device(make_batch(micro_batch), device, 0)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
        return task.training_step(batch, 0)


def _source_hash(*values: object) -> str:
    """SHA-256 of each value's source code where it can be read, else of its repr."""
    texts = []
    for value in values:
        try:
            texts.append(inspect.getsource(cast(Any, value)))
        except (OSError, TypeError):  # defined in a console, or no function
            texts.append(repr(value))
    return hashlib.sha256(" ".join(texts).encode()).hexdigest()


def _checked_layers(layers: object, *, model: nn.Module) -> list[nn.Module]:
    """`layers` as a list. Raises BadInputError for one that is no module of the network: it would change nothing."""
    modules: list[Any] = list(cast(Iterable[Any], layers)) if isinstance(layers, Iterable) else [layers]
    own = {id(module) for module in model.modules()}
    if foreign := [layer for layer in modules if id(layer) not in own]:
        raise BadInputError(
            f"layers has {foreign[0]!r}, which is no module of the network: pass its modules, as in list(model.layers)"
        )
    return modules


@contextmanager
def _declared(model: nn.Module, layers: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, the network's `checkpoint_units` are `layers`: those whose activations may be recomputed."""
    if list(getattr(model, "checkpoint_units", [])) == list(layers):
        yield
        return
    attributes: dict[str, Any] = model.__dict__
    attributes["checkpoint_units"] = list(layers)
    try:
        yield
    finally:
        del attributes["checkpoint_units"]


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Inside, the network trains. Afterwards its device, buffers, modes and gradients are as before."""
    place = next(iter(model.parameters())).device
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    grads = {param: param.grad for param in model.parameters()}
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    for param in grads:
        param.grad = None
    try:
        yield
    finally:
        model.to(place)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        for param, grad in grads.items():
            param.grad = grad
        for module, training in modes:
            module.training = training
