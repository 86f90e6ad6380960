"""Tasks: groups, schedule, losses, and checkpoints that hold nothing but tensors and plain values."""

import lightning as L
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.nn import functional as F

from baoc.data import build_data
from baoc.errors import BadInputError
from baoc.tasks import OptimizerSettings, build_task
from baoc.tasks.vision import VisionTask
from tests.support.tiny import tiny_trainer


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 10))


def digits():
    return build_data("digits", task="vision", batch_size=64)


class Rates(L.Callback):
    def __init__(self):
        self.lrs: list[float] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.lrs.append(optimizer.param_groups[0]["lr"])


def test_schedule_warms_up_and_ends_at_a_tenth_under_a_trainer():
    rates, task = Rates(), VisionTask(network(), optimizer=OptimizerSettings(lr=1.0))
    tiny_trainer(max_steps=20, callbacks=[rates]).fit(task, digits())
    assert rates.lrs[:2] == [0.5, 1.0]
    assert rates.lrs[2:] == sorted(rates.lrs[2:], reverse=True)
    assert rates.lrs[-1] == pytest.approx(0.1)
    assert rates.lrs[10] == pytest.approx(0.55)  # half way down the cosine


@pytest.mark.parametrize(
    ("settings", "steps", "factors"),
    [
        ({"warmup_fraction": 0.5}, 4, [0.5, 1.0, 0.55, 0.1]),
        ({"warmup_fraction": 0.0, "final_lr_fraction": 0.0}, 2, [0.5, 0.0]),
        ({"schedule": "constant", "warmup_fraction": 0.25}, 4, [1.0, 1.0, 1.0, 1.0]),
        ({"warmup_fraction": 1.0}, 3, [1 / 3, 2 / 3, 1.0, 0.1]),  # the last one lies behind the end
        ({}, 1, [0.1]),
    ],
)
def test_lr_factor(settings, steps, factors):
    schedule = OptimizerSettings(**settings)
    got = [schedule.lr_factor(step, num_steps=steps) for step in range(len(factors))]
    assert got == pytest.approx(factors)
    assert schedule.lr_factor(10 * steps, num_steps=steps) == pytest.approx(
        1.0 if schedule.schedule == "constant" else schedule.final_lr_fraction
    )


def test_norms_and_biases_do_not_decay_and_frozen_ones_are_left_out():
    model = network()
    model[1].bias.requires_grad_(False)
    task = VisionTask(model, optimizer=OptimizerSettings(weight_decay=0.3, betas=(0.8, 0.95), eps=1e-6))
    trainer = tiny_trainer(max_steps=1)
    trainer.fit(task, digits())
    optimizer = trainer.optimizers[0]
    assert type(optimizer) is torch.optim.AdamW
    decayed, others = optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert {id(p) for p in decayed["params"]} == {id(model[1].weight), id(model[4].weight)}
    assert {id(p) for p in others["params"]} == {id(model[2].weight), id(model[2].bias), id(model[4].bias)}
    assert decayed["param_names"] == ["model.1.weight", "model.4.weight"]
    assert (decayed["betas"], decayed["eps"]) == ((0.8, 0.95), 1e-6)


def test_endless_run_needs_an_end_for_a_cosine():
    with pytest.raises(BadInputError, match=r"cosine schedule needs an end: give trainer.max_steps"):
        tiny_trainer(max_steps=-1, max_epochs=-1).fit(VisionTask(network()), digits())


def test_smoothing_acts_on_training_and_never_on_validation():
    torch.manual_seed(0)
    smooth = VisionTask(network(), label_smoothing=0.2)
    logged: dict[str, torch.Tensor] = {}
    smooth.log = lambda name, value, **_: logged.update({name: value})
    batch = {"images": torch.randn(4, 1, 8, 8), "labels": torch.tensor([0, 1, 2, 3])}
    logits = smooth.model(batch["images"])
    loss = smooth.training_step(batch, 0)
    smooth.validation_step(batch, 0)
    torch.testing.assert_close(loss, F.cross_entropy(logits, batch["labels"], label_smoothing=0.2))
    torch.testing.assert_close(logged["val/loss"], F.cross_entropy(logits, batch["labels"]))
    assert logged["val/acc"] == (logits.argmax(-1) == batch["labels"]).float().mean()
    assert not torch.equal(logged["train/loss"], logged["val/loss"])
    assert loss.requires_grad and not logged["train/loss"].requires_grad


def test_mixup_blends_images_and_losses_and_its_random_state_is_torchs():
    batch = {"images": torch.randn(4, 1, 8, 8), "labels": torch.tensor([0, 1, 2, 3])}
    task = VisionTask(network(), mixup=0.5, label_smoothing=0.1)
    task.log = lambda *_, **__: None
    torch.manual_seed(3)
    share = float(torch.distributions.Beta(0.5, 0.5).sample())
    partner = torch.randperm(4)
    logits = task.model(share * batch["images"] + (1 - share) * batch["images"][partner])
    targets = F.one_hot(batch["labels"], 10).float()
    targets = 0.9 * (share * targets + (1 - share) * targets[partner]) + 0.1 / 10
    torch.manual_seed(3)
    torch.testing.assert_close(task.training_step(batch, 0), F.cross_entropy(logits, targets))
    torch.manual_seed(4)
    assert task.training_step(batch, 0) != F.cross_entropy(logits, targets)
    with pytest.raises(BadInputError, match=r"mixup must be 0 \(none\) or the alpha of a Beta.*, not -1"):
        VisionTask(network(), mixup=-1)


def test_validation_weighs_a_short_last_batch_by_its_size():
    task, data = VisionTask(network()), digits()  # 359 images: five batches of 64, one of 39
    metrics = tiny_trainer().validate(task, data, verbose=False)[0]
    batch = next(iter(build_data("digits", task="vision", batch_size=359).val_dataloader()))
    with torch.no_grad():
        expected = F.cross_entropy(task.model(batch["images"]), batch["labels"])
    assert metrics["val/loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert set(metrics) == {"val/loss", "val/acc"} and VisionTask.quality == ("val/loss", False)


def test_checkpoint_holds_plain_values_and_rebuilds_the_task(tmp_path):
    betas = OmegaConf.create([0.8, 0.9])
    task = VisionTask(network(), optimizer=OptimizerSettings(lr=0.5, betas=betas), label_smoothing=0.1)
    trainer = tiny_trainer(max_steps=2)
    trainer.fit(task, digits())
    trainer.save_checkpoint(tmp_path / "task.ckpt")
    hparams = torch.load(tmp_path / "task.ckpt", weights_only=True)["hyper_parameters"]
    assert hparams["optimizer"]["betas"] == (0.8, 0.9)
    assert hparams["label_smoothing"] == 0.1
    again = VisionTask.load_from_checkpoint(tmp_path / "task.ckpt", model=network(), weights_only=True)
    assert again.settings == task.settings
    assert again.label_smoothing == 0.1
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), task.parameters(), strict=True))


def test_settings_become_plain_floats():
    settings = OptimizerSettings(lr=1, betas=OmegaConf.create([0, 0.9]), weight_decay=0)
    assert settings.betas == (0.0, 0.9)
    assert {type(value) for value in (settings.lr, settings.weight_decay, *settings.betas)} == {float}


def test_impossible_smoothing_is_refused():
    with pytest.raises(BadInputError, match="label_smoothing must be at least 0 and below 1, not 1"):
        build_task("vision", model=network(), label_smoothing=1)
