"""Weights that Lightning, module and callbacks put into the model: averages, and what is set while one loads."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel

from baoc import BaocStrategy
from baoc.errors import BadInputError
from baoc.planning.planner import PlannerSettings
from baoc.training.session import SessionSettings
from tests.support.classifier import QUIET, Classifier, loader, same

pytestmark = [
    pytest.mark.slow,  # they train by Lightning
    pytest.mark.filterwarnings(
        "ignore:.*You're resuming from a checkpoint that ended before.*",
        "ignore:.*Swapping scheduler.*",
        "ignore:SWA is currently only supported every epoch",
        "ignore:Checkpoint directory .* exists:UserWarning",
    ),
]
NARROW = SessionSettings(planner=PlannerSettings(specs=("adamw", "adamw_int8+split8"), keep_fp32_roles=()))


class Setting(Classifier):
    """Puts other weights into the model while its checkpoint loads, as averages and adapters do."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {name: value + 0.5 for name, value in checkpoint["state_dict"].items()}


class SetsWeights(L.Callback):
    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        with torch.no_grad():
            for param in pl_module.parameters():
                param.add_(0.25)


def trained(
    folder: Path,
    strategy: Any,
    *,
    steps: int = 8,
    resume: bool = False,
    module: Any = None,
    callbacks: Any = (),
    **given: Any,
) -> Classifier:
    module = module or Classifier()
    saving = ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    made = [callback() for callback in callbacks]
    arguments = {**QUIET, "enable_checkpointing": True, "callbacks": [saving, *made], **given}
    trainer = L.Trainer(strategy=strategy, max_steps=steps, **arguments)
    path = str(folder / "step=4.ckpt") if resume else None
    trainer.fit(module, loader(num=32), ckpt_path=path, weights_only=True if resume else None)
    return module


def averaging() -> L.Callback:
    return EMAWeightAveraging(decay=0.5)


CASES: dict[str, tuple[Any, Any]] = {
    "an average": (Classifier, [averaging]),
    "the module": (Setting, []),
    "a callback": (Classifier, [SetsWeights]),
    "nobody": (Classifier, []),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_in_the_model_when_training_begins_again_stays(case: str, tmp_path: Path):
    module, callbacks = CASES[case]
    ends = []
    for strategy in ("auto", BaocStrategy("unlimited")):
        folder = tmp_path / str(len(ends))
        trained(folder, strategy, module=module(), callbacks=callbacks)
        again = "auto" if strategy == "auto" else BaocStrategy("unlimited")
        ends.append(trained(folder, again, resume=True, module=module(), callbacks=callbacks))
    assert same(*ends)


@pytest.mark.parametrize("budget", ["state_25", "8gb"])
def test_a_run_with_averages_resumes_bit_for_bit(budget: str, tmp_path: Path):
    whole = trained(tmp_path, BaocStrategy(budget), callbacks=[averaging])
    again = trained(tmp_path, BaocStrategy(budget), resume=True, callbacks=[averaging])
    assert same(whole, again)


def test_weights_that_the_first_plan_narrows_have_all_their_bits_again(tmp_path: Path):
    """The checkpoint is of native weights, the run that resumes it starts on a plan with 16-bit ones."""
    wide, narrow = (
        SessionSettings(planner=PlannerSettings(specs=specs, keep_fp32_roles=()))
        for specs in (("adamw", "adamw_int8"), ("adamw_int8+split8", "adamw", "adamw_int8"))
    )
    whole = trained(tmp_path, BaocStrategy("state_50", settings=wide), precision="bf16-mixed")
    other = BaocStrategy("state_50", settings=narrow)
    again = trained(tmp_path, other, resume=True, precision="bf16-mixed")
    assert same(whole, again)


@pytest.mark.parametrize("kind", ["callback", "swa", "module"])
def test_averages_leave_out_weights_that_they_would_not_see(kind: str, tmp_path: Path, caplog):
    module, callbacks = Classifier(), [averaging]
    if kind == "swa":
        callbacks = [lambda: StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1)]
    elif kind == "module":
        module.average = AveragedModel(nn.Linear(2, 2)).requires_grad_(False)
        callbacks = []
    strategy = BaocStrategy("unlimited", settings=NARROW)
    trained(tmp_path, strategy, steps=3, module=module, callbacks=callbacks, precision="bf16-mixed")
    assert "averages weights, so that specs with weights of 16 bits are left out: adamw_int8+split8" in caplog.text
    assert strategy.plan is not None and set(strategy.plan.allocation.choices.values()) == {"adamw"}
    assert all(param.dtype == torch.float32 for param in module.parameters())


def test_a_recipe_of_such_weights_beside_an_average_is_refused(tmp_path: Path):
    settings = SessionSettings(planner=PlannerSettings(specs=("adamw_int8+split8",), keep_fp32_roles=()))
    with pytest.raises(BadInputError, match=r"EMAWeightAveraging averages weights, and adamw_int8\+split8 keeps them"):
        trained(
            tmp_path, BaocStrategy("8gb", settings=settings), steps=1, callbacks=[averaging], precision="bf16-mixed"
        )
