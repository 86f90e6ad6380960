"""Hugging Face's Trainer inside a budget: `trainer = with_budget(Trainer(...), budget="8gb")`.

The Trainer builds its AdamW as usual, at the start of `train`, when the model is on its device. The budgeted optimizer
replaces it and takes its groups (decay and no decay), rates, betas and eps. Schedule, accumulation, clipping,
checkpoints and resuming stay the Trainer's.
"""

from collections.abc import Callable, Sized
from typing import Any, TypeVar, cast

from torch import nn
from torch.utils.data import IterableDataset

try:
    from transformers import Trainer, TrainerCallback, TrainingArguments
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"Hugging Face's Trainer needs {error.name}, which is not installed: pip install 'baoc[hf]'", name=error.name
    ) from error

from baoc.errors import BadInputError
from baoc.tracking.console import say
from baoc.training.advise import Advice, advise
from baoc.training.plain_loop import BaocOptimizer
from baoc.training.user_optimizer import hyperparameters

AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)


def with_budget(trainer: AnyTrainer, *, budget: Any = "auto", auto_batch: bool = False, **options: Any) -> AnyTrainer:
    """Makes a trainer train inside `budget`, and returns it. Call it before `train`.

    Replaces `trainer.create_optimizer` and adds a callback; subclasses that override it work if they build an AdamW.
    The plan, moves and verdict are printed, and logged like the trainer's own metrics.

    Args:
        budget: Every spelling of the command line, such as "8gb" or "state_25".
        auto_batch: Choose `per_device_train_batch_size`, `gradient_accumulation_steps` and recomputed layers by
            `baoc.advise`. Their product, the samples of a step, stays as the arguments have it.
        options: Those of BaocOptimizer: `recipe`, `pretrained`, `settings`, `verbose`, ...

    Raises:
        BadInputError: The trainer has an optimizer or a budget already; or, from `train`, it builds one other than
            AdamW.
        InfeasibleBudgetError: With `auto_batch`, no way to run a step fits.
    """
    has_budget = any(isinstance(callback, BudgetCallback) for callback in trainer.callback_handler.callbacks)
    built_here = has_budget and "create_optimizer" in vars(trainer)  # after `train`, by an earlier call
    if trainer.optimizer is not None and not built_here:
        raise BadInputError(
            f"the Trainer has an optimizer already ({type(trainer.optimizer).__name__}): leave optimizers= out, or "
            "give optimizers=(make_optimizer(model, arguments, budget=...), None) in place of with_budget"
        )
    if has_budget:
        raise BadInputError("the Trainer has a budget already: call with_budget once, with the budget that counts")
    if auto_batch:
        shared = ("recipe", "settings", "pretrained")
        split_batches(trainer, budget=budget, **{key: options[key] for key in shared if key in options})
    build: Callable[..., Any] = trainer.create_optimizer

    def create_optimizer(*args: Any, **kwargs: Any) -> Any:
        built = build(*args, **kwargs)
        if budgeted(built) is None:  # a second `train` goes on with the optimizer of the first, in wrappers
            said = 'create_optimizer of the Trainer (TrainingArguments(optim="adamw_torch") is AdamW) returned'
            hyperparameters(built, said=said)
            built = trainer.optimizer = BaocOptimizer.from_optimizer(built, trainer.model, budget=budget, **options)
        return built

    trainer.create_optimizer = create_optimizer
    trainer.add_callback(BudgetCallback(trainer))
    return trainer


def split_batches(trainer: Trainer, *, budget: Any = "auto", **options: Any) -> Advice:
    """Chooses the trainer's micro-batch, accumulation and recomputed layers by `baoc.advise`, and prints them.

    Measures steps of the trainer's own `compute_loss` on the first samples of its training set. Raises BadInputError
    for a set whose samples have no index, for several processes, and for fp16.
    """
    arguments, dataset, model = trainer.args, trainer.train_dataset, trainer.model
    has_index = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not has_index or isinstance(dataset, IterableDataset) or not len(cast(Sized, dataset)):
        raise BadInputError(
            "auto_batch takes the first samples of train_dataset, and there are none by number: leave it out"
        )
    if arguments.world_size > 1 or arguments.n_gpu > 1:
        raise BadInputError("auto_batch is for one process with one device: leave it out, or set the batch yourself")
    if arguments.fp16:
        raise BadInputError(
            "auto_batch measures a step in fp32 or bf16, and the arguments have fp16=True: set bf16=True, or leave "
            "auto_batch out"
        )
    samples: Any = dataset
    collate = trainer.data_collator
    if hasattr(dataset, "column_names") and arguments.remove_unused_columns:
        collate = trainer._get_collator_with_removed_columns(collate, description="training")  # as in transformers 5

    def make_batch(size: int) -> Any:
        return dict(collate([samples[number % len(samples)] for number in range(size)]))

    def loss(_: Any, batch: Any) -> Any:
        return trainer.compute_loss(model, dict(batch))  # pyright: ignore[reportArgumentType]

    advice = advise(
        model,  # pyright: ignore[reportArgumentType]
        make_batch,
        loss,
        batch_size=arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps,
        budget=budget,
        precision="bf16-mixed" if arguments.bf16 else "32-true",
        betas=(arguments.adam_beta1, arguments.adam_beta2),
        device=arguments.device,
        **options,
    )
    arguments.per_device_train_batch_size = trainer._train_batch_size = advice.micro_batch
    arguments.gradient_accumulation_steps = advice.accumulation
    advice.recompute()
    say(f"auto_batch: {advice}")
    return advice


def make_optimizer(
    model: nn.Module, arguments: TrainingArguments, *, budget: Any = "auto", **options: Any
) -> BaocOptimizer:
    """For `Trainer(model, arguments, optimizers=(make_optimizer(model, arguments, budget=...), None))`.

    Groups, rates, betas and eps are those that the Trainer would give its AdamW. Moves the model to its device first,
    for which the plan is made.
    """
    if arguments.place_model_on_device:
        model.to(arguments.device)
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # pyright: ignore[reportArgumentType]
    trainable = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    groups = [
        {"params": [pair for pair in trainable if (pair[0] in decayed) == is_decayed], "weight_decay": weight_decay}
        for is_decayed, weight_decay in ((True, arguments.weight_decay), (False, 0.0))
    ]
    return BaocOptimizer(
        [group for group in groups if group["params"]],
        model=model,
        budget=budget,
        lr=arguments.learning_rate,
        betas=(arguments.adam_beta1, arguments.adam_beta2),
        eps=arguments.adam_epsilon,
        **options,
    )


class BudgetCallback(TrainerCallback):
    """Logs plan, moves and peak through the trainer, and prints at the end of `train` whether the budget was met.

    `with_budget` adds it. With `optimizers=` add it by `trainer.add_callback(BudgetCallback(trainer))`.
    """

    def __init__(self, trainer: Trainer):
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = budgeted(kwargs.get("optimizer"))
        if optimizer is not None:
            optimizer.narrator.log = lambda values: self._trainer.log(dict(values))
            self._trainer.log(optimizer.narrator.values())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = budgeted(kwargs.get("optimizer"))
        if optimizer is not None:
            optimizer.narrator.conclude()
            optimizer.narrator.log = None


def budgeted(optimizer: Any) -> BaocOptimizer | None:
    """The BaocOptimizer inside accelerate's wrappers; None for another optimizer."""
    while optimizer is not None and not isinstance(optimizer, BaocOptimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer
