"""Gradient release under Lightning's Trainer: clipping moves into backward; accumulation and a GradScaler are refused.

With gradient release a block is stepped in backward, as soon as its gradients have arrived, and they are freed.
"""

import logging

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden

from baoc.errors import BadInputError
from baoc.optim import GradientRelease

log = logging.getLogger(__name__)
_SEES_GRADIENTS = ("on_after_backward", "on_before_optimizer_step")


def released_clipping(trainer: L.Trainer, release: bool | GradientRelease) -> bool | GradientRelease:
    """The release with the Trainer's clipping, which has to be done in backward; False if `release` is False.

    Raises BadInputError for whatever needs all gradients before the first update: accumulation, a GradScaler, clipping
    by the module. Warns of hooks of the module and callbacks that will find no gradients.
    """
    if release is False:
        return False
    callbacks: list[L.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    planned = [cb.scheduling for cb in callbacks if isinstance(cb, GradientAccumulationScheduler)]
    most = max([trainer.accumulate_grad_batches, *(number for plan in planned for number in plan.values())])
    if most != 1:
        raise BadInputError(
            f"gradient release steps in every backward, but accumulate_grad_batches={most}: set it to 1 (micro_batch "
            "equal to batch_size), or optim.release_gradients=false"
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise BadInputError(
            f"trainer.precision={trainer.precision} has a GradScaler, which skips the whole step where a gradient "
            "overflows; with gradient release blocks are stepped by then: use bf16-mixed, or "
            "optim.release_gradients=false"
        )
    module = trainer.lightning_module
    if is_overridden("configure_gradient_clipping", module):
        raise BadInputError(
            f"{type(module).__name__} has a configure_gradient_clipping of its own, which would find no gradients: set "
            "gradient_clip_val of the Trainer, or optim.release_gradients=false"
        )
    for owner, hooks in seeing_gradients(trainer).items():
        log.warning("gradients are released in backward: %s of %s find none", " and ".join(hooks), owner)
    limit, own = trainer.gradient_clip_val, release if isinstance(release, GradientRelease) else GradientRelease()
    if not limit:  # 0 means none
        return own
    if own != GradientRelease():
        raise BadInputError(
            f"the Trainer clips (gradient_clip_val={limit}) and so does {own}: say it in one of the two places"
        )
    if trainer.gradient_clip_algorithm == "value":
        return GradientRelease(clip_value=float(limit))
    return GradientRelease(clip_norm=float(limit))


def seeing_gradients(trainer: L.Trainer) -> dict[str, list[str]]:
    """Class name of module or callback -> its hooks between backward and step; BAOC's own are left out."""
    callbacks: list[L.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    owners = [(trainer.lightning_module, L.LightningModule), *((callback, L.Callback) for callback in callbacks)]
    hooks_of = {}
    for owner, kind in owners:
        hooks = [name for name in _SEES_GRADIENTS if getattr(type(owner), name) is not getattr(kind, name)]
        if hooks and not type(owner).__module__.startswith("baoc."):
            hooks_of[type(owner).__name__] = hooks
    return hooks_of


def leaves_gradients(trainer: L.Trainer) -> bool:
    """True if nothing changes gradients between the last backward of a step and the step itself."""
    scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
    clipped = trainer.gradient_clip_val or is_overridden("configure_gradient_clipping", trainer.lightning_module)
    return not scaled and not clipped and not seeing_gradients(trainer)


def leave_clipping(precision: Precision) -> None:
    """Disables Lightning's clipping, which would find no gradients; torch's clipping by value fails without any."""
    setattr(precision, "clip_gradients", lambda *args, **kwargs: None)  # noqa: B010 - of this plugin alone


def take_clipping_back(precision: Precision) -> None:
    """Undoes `leave_clipping`."""
    vars(precision).pop("clip_gradients", None)
