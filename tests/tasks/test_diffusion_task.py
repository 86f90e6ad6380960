"""The diffusion task: its loss, noise that follows from the step, validation that is the same for all, and its end."""

import copy
import re
import struct
import zlib
from itertools import islice
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from baoc.callbacks.checkpoint import SafeCheckpoint
from baoc.callbacks.pictures import FinalPictures
from baoc.data import build_data
from baoc.errors import BadInputError
from baoc.models.switches import set_recomputed
from baoc.tasks import OptimizerSettings, build_task
from baoc.tasks.diffusion import DiffusionTask, fixed_noise, fixed_timesteps
from baoc.tasks.sample_grid import grid_labels, samples_at_once, write_grid
from tests.support.tiny import tiny_trainer


def digits(**settings):
    return build_data("digits", task="diffusion", **{"batch_size": 32, **settings})


class Recorder(nn.Module):
    """Predicts a little of what it sees and remembers with what it was asked."""

    null_label = 10

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.asked = []

    def forward(self, images, timesteps, labels):
        self.asked.append((images.detach().clone(), timesteps.clone(), labels.clone()))
        return self.gain * images


class Small(nn.Module):
    """A convolution that a label shifts: enough to train, to sample and to average."""

    null_label = 10

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.mix, self.shift = nn.Conv2d(1, 1, 3, padding=1), nn.Embedding(11, 1)

    def forward(self, images, timesteps, labels):
        return self.mix(images) + self.shift(labels).view(-1, 1, 1, 1)


def fit(*, model=None, data=None, ckpt_path=None, callbacks=(), trainer=None, **options):
    model = Recorder() if model is None else model
    data = digits() if data is None else data
    task = DiffusionTask(model, spec=data.spec, **options)
    settings = {"max_steps": 4, "limit_val_batches": 0, "callbacks": list(callbacks), **(trainer or {})}
    tiny_trainer(**settings).fit(task, data, ckpt_path=ckpt_path, weights_only=True)
    return task


def test_a_prediction_is_a_tensor_or_the_sample_of_what_is_returned():
    class Wrapped(Small):
        def forward(self, images, timesteps, labels):
            return SimpleNamespace(sample=super().forward(images, timesteps, labels))

    plain, wrapped = fit(model=Small(), trainer={"max_steps": 1}), fit(model=Wrapped(), trainer={"max_steps": 1})
    assert torch.equal(plain.model.mix.weight, wrapped.model.mix.weight)
    labels, shape = torch.zeros(2, dtype=torch.long), (1, 8, 8)
    assert torch.equal(plain.sample(labels, shape=shape), wrapped.sample(labels, shape=shape))


@pytest.mark.parametrize(("given", "told"), [(torch.zeros(32, 2, 8, 8), r"\(32, 2, 8, 8\)"), (("x",), "tuple")])
def test_what_is_no_prediction_is_refused_with_what_is_needed(given, told):
    class Wrong(Small):
        def forward(self, images, timesteps, labels):
            return given

    with pytest.raises(BadInputError, match=rf"returned {told} and task diffusion needs a prediction of the images'"):
        fit(model=Wrong())


def test_steps_equal_a_plain_loop_with_torchs_adamw():
    data, settings = digits(), OptimizerSettings(lr=1e-2, schedule="constant", warmup_fraction=0.0)
    model = Small()
    plain = copy.deepcopy(model)
    losses = Losses()
    task = fit(model=model, data=data, callbacks=[losses], optimizer=settings, trainer={"max_steps": 30})
    decayed = [p for p in plain.parameters() if p.ndim >= 2]
    others = [p for p in plain.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2)
    expected, loader = [], digits().train_dataloader()
    for step, batch in enumerate(islice(loader, 30), start=1):
        task.at = (step, 0)
        generator = task.generator(torch.device("cpu"))
        timesteps = torch.randint(1000, (32,), generator=generator)
        noise = torch.randn(32, 1, 8, 8, generator=generator)
        labels = torch.where(torch.rand(32, generator=generator) < 0.1, 10, batch["labels"])
        bars = task.schedule.alpha_bars[timesteps].view(-1, 1, 1, 1)
        noisy = bars.sqrt().float() * batch["images"] + (1 - bars).sqrt().float() * noise
        loss = F.mse_loss(plain(noisy, timesteps, labels), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses.values == pytest.approx(expected, abs=1e-5)
    assert expected[-1] < 0.8 * expected[0]


class Losses(L.Callback):
    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.values.append(outputs["loss"].item())


def test_noise_follows_from_seed_and_step_and_global_generators_are_left_alone():
    before = torch.get_rng_state()
    one, again = fit().model.asked, fit().model.asked
    other = fit(noise_seed=1).model.asked
    assert torch.equal(torch.get_rng_state(), before)
    assert len(one) == 4
    for (images, timesteps, labels), same in zip(one, again, strict=True):
        assert torch.equal(images, same[0]) and torch.equal(timesteps, same[1]) and torch.equal(labels, same[2])
    assert not any(torch.equal(a[1], b[1]) for a, b in zip(one, other, strict=True))
    assert len({tuple(timesteps.tolist()) for _, timesteps, _ in one}) == 4


def test_micro_batches_of_a_step_have_noise_of_their_own():
    asked = fit(
        data=digits(batch_size=8, accumulate=4), trainer={"accumulate_grad_batches": 4, "max_steps": 2}
    ).model.asked
    assert len({tuple(timesteps.tolist()) for _, timesteps, _ in asked}) == len(asked) == 8
    steps = fit(data=digits(batch_size=8)).model.asked
    assert torch.equal(asked[4][1], steps[1][1]), "a step's first micro-batch has the step's noise"


def test_resumed_run_is_the_run_that_was_never_stopped(tmp_path):
    keep = SafeCheckpoint(tmp_path, every_n_steps=3, keep=2)
    whole = fit(
        model=Small(),
        callbacks=[keep],
        trainer={"max_steps": 5, "enable_checkpointing": True},
    )
    at3 = tmp_path / "checkpoints" / "step_00000003.ckpt"
    with pytest.warns(UserWarning, match="callbacks used to create the checkpoint need to be provided"):
        resumed = fit(model=Small(1), ckpt_path=at3, trainer={"max_steps": 5})
    for (name, one), other in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other), name
        assert torch.equal(whole.ema.averages[name], resumed.ema.averages[name])


def test_hidden_labels_are_a_tenth_and_none_without_dropout():
    labels = torch.cat(
        [labels for _, _, labels in fit(data=digits(batch_size=256), trainer={"max_steps": 5}).model.asked]
    )
    assert 0.07 < (labels == 10).float().mean() < 0.13
    assert all((labels < 10).all() for _, _, labels in fit(label_dropout=0.0).model.asked)


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
def test_perfect_predictions_have_no_loss(prediction):
    data = digits()

    class Knows(Recorder):
        def forward(self, images, timesteps, labels):
            a, s = task.schedule.signal_and_noise(timesteps)
            noise = (images - a * clean) / s
            return 0 * self.gain + (noise if prediction == "epsilon" else a * noise - s * clean)

    task = DiffusionTask(Knows(), spec=data.spec, prediction=prediction)
    logged = {}
    task.log = lambda name, value, **_: logged.update({name: value})
    batch = next(iter(data.train_dataloader()))
    clean = batch["images"]
    assert task.training_step(batch, 0) < 1e-6
    task.validation_step(batch, 0)
    assert logged["val/mse"] < 1e-6


def test_validation_measures_the_noise_whatever_is_predicted():
    """Both networks say that there is no noise: e = 0 is v = -s x_0 = -s x_t / a."""
    data = digits()

    class NoNoise(Recorder):
        def forward(self, images, timesteps, labels):
            a, s = task.schedule.signal_and_noise(timesteps)
            return 0 * images if task.prediction == "epsilon" else -s * images / a

    values = []
    for prediction in ("epsilon", "v"):
        task = DiffusionTask(NoNoise(), spec=data.spec, prediction=prediction)
        values.append(tiny_trainer().validate(task, digits(), verbose=False)[0]["val/mse"])
    assert values[0] == pytest.approx(1.0, abs=0.05)  # the variance of noise
    assert values[1] == pytest.approx(values[0], abs=1e-4)


@pytest.mark.parametrize("batch_size", [7, 64, 359])
def test_validation_is_the_same_for_any_batch_size(batch_size):
    model = Recorder()
    task = DiffusionTask(model, spec=digits().spec, ema_decay=0.0)
    value = tiny_trainer().validate(task, digits(batch_size=batch_size), verbose=False)[0]["val/mse"]
    noisy = torch.cat([images for images, _, _ in model.asked])
    assert torch.equal(torch.cat([timesteps for _, timesteps, _ in model.asked]), fixed_timesteps(0, 359))
    expected = F.mse_loss(0.5 * noisy, fixed_noise(0, 359, shape=(1, 8, 8)))
    assert value == pytest.approx(expected.item(), rel=1e-5)
    model.asked.clear()
    tiny_trainer().validate(task, digits(batch_size=batch_size), verbose=False)
    assert torch.equal(torch.cat([images for images, _, _ in model.asked]), noisy)


def test_fixed_noise_and_timesteps_belong_to_the_sample():
    whole = fixed_noise(0, 200, shape=(2, 3, 3))
    assert torch.equal(fixed_noise(60, 100, shape=(2, 3, 3)), whole[60:160])
    assert torch.equal(fixed_timesteps(60, 100), fixed_timesteps(0, 200)[60:160])
    assert whole.std() == pytest.approx(1, abs=0.05)
    counts = torch.histc(fixed_timesteps(0, 200).float(), bins=10, min=0, max=1000)
    assert counts.min() >= 18 and counts.max() <= 22


# -- the end ----------------------------------------------------------------------------------------------------------


def trained(pictures, *, precision="32-true", **options):
    return fit(
        model=Small(),
        data=digits(batch_size=256),
        callbacks=[pictures],
        sample_steps=2,
        trainer={"max_steps": 1, "logger": False, "limit_val_batches": 1, "precision": precision},
        **options,
    )


def read_png(path):
    """(H, W, C) of an unfiltered 8-bit PNG; checks the signature and every checksum."""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    position, parts = 8, {}
    while position < len(content):
        length = struct.unpack(">I", content[position : position + 4])[0]
        kind, body = content[position + 4 : position + 8], content[position + 8 : position + 8 + length]
        assert struct.unpack(">I", content[position + 8 + length : position + 12 + length])[0] == zlib.crc32(
            kind + body
        )
        parts[kind], position = body, position + 12 + length
    width, height, depth, colour = struct.unpack(">IIBB", parts[b"IHDR"][:10])
    assert depth == 8 and b"IEND" in parts
    rows = np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8).reshape(height, -1)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, {0: 1, 2: 3}[colour])


def test_finished_run_leaves_a_grid(tmp_path, capsys):
    task = trained(FinalPictures(tmp_path))
    assert read_png(tmp_path / "samples.png").shape == (8 * 33 + 1, 10 * 33 + 1, 1)
    assert re.search(r"drawing 80 samples, \d+ at once; task.num_samples=0", capsys.readouterr().out)
    assert task.training
    (tmp_path / "again").mkdir()
    trained(FinalPictures(tmp_path / "again"))
    once, again = (tmp_path / folder / "samples.png" for folder in ("", "again"))
    assert once.read_bytes() == again.read_bytes(), "they depend on nothing but the weights"


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_samples_are_drawn_in_every_precision(tmp_path, precision):
    trained(FinalPictures(tmp_path), precision=precision, num_samples=2)
    assert (tmp_path / "samples.png").is_file()


def test_more_samples_at_once_than_a_micro_batch_where_training_keeps_the_activations_of_many_layers():
    task = SimpleNamespace(model=nn.Module())
    assert samples_at_once(task, micro_batch=2) == 2  # layers unknown
    task.model.checkpoint_units = nn.ModuleList(nn.Linear(2, 2) for _ in range(28))
    assert samples_at_once(task, micro_batch=2) == 14
    set_recomputed(task.model, name="any")
    assert samples_at_once(task, micro_batch=2) == 2
    set_recomputed(task.model, 0)
    assert samples_at_once(task, micro_batch=2) == 14


def test_gradients_of_the_last_step_are_gone_when_samples_are_drawn(tmp_path, monkeypatch):
    held = []
    monkeypatch.setattr(
        DiffusionTask, "sample", lambda task, labels, **_: held.extend(p.grad for p in task.parameters()) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        trained(FinalPictures(tmp_path))
    assert held and all(grad is None for grad in held)


@pytest.mark.parametrize("num_samples", [0, 3])
def test_number_of_samples_is_the_users(tmp_path, num_samples):
    trained(FinalPictures(tmp_path), num_samples=num_samples)
    assert (tmp_path / "samples.png").exists() == (num_samples > 0)


def test_large_network_is_not_sampled_on_a_cpu_unless_asked(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("baoc.tasks.sample_grid.AFFORDABLE_ON_CPU", 10)
    trained(FinalPictures(tmp_path))
    assert not (tmp_path / "samples.png").exists()
    assert "no samples: 0M parameters on a CPU; ask with task.num_samples=16" in capsys.readouterr().out


def test_colours_and_latents_make_grids_too(tmp_path):
    colours = torch.tensor([[1.0, -1.0, 0.0]]).view(1, 3, 1, 1).expand(2, 3, 40, 40)
    write_grid(colours, tmp_path / "colours.png", columns=2)
    pixels = read_png(tmp_path / "colours.png")
    assert pixels.shape == (42, 83, 3)
    assert pixels[1, 1].tolist() == [255, 0, 128]
    assert pixels[0, 0].tolist() == pixels[1, 41].tolist() == [255, 255, 255]
    write_grid(torch.randn(3, 4, 32, 32), tmp_path / "latents.png", columns=2)
    assert read_png(tmp_path / "latents.png").shape == (67, 67, 3)
    write_grid(torch.full((1, 1, 8, 8), float("nan")), tmp_path / "nan.png", columns=1)
    assert not read_png(tmp_path / "nan.png")[1:-1, 1:-1].any()


def test_columns_of_the_grid_are_classes_where_they_fit():
    labels, columns = grid_labels(20, num_classes=10)
    assert (labels.view(-1, columns)[:, 3] == 3).all() and columns == 10
    labels, columns = grid_labels(80, num_classes=1000)
    assert columns == 8 and labels.unique().numel() == 80 and labels.max() < 1000
    assert grid_labels(8, num_classes=1)[1] == 8


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"prediction": "x0"}, "no prediction 'x0'; choose from: epsilon, v"),
        ({"noise_schedule": "cos"}, "no noise schedule 'cos'"),
        ({"sampler": "ddjm"}, r"no sampler 'ddjm' \(did you mean ddpm\?\)"),
        ({"label_dropout": 1.0}, "label_dropout must be at least 0 and below 1, not 1.0"),
        ({"sample_steps": 0}, "sample_steps=0, guidance=1.5 and num_samples=None: steps must be 1 or more"),
        ({"ema_decay": 1.0}, "ema_decay must be above 0 and below 1"),
    ],
)
def test_impossible_options_are_refused(options, text):
    with pytest.raises(BadInputError, match=text):
        build_task("diffusion", model=Recorder(), **options)


def test_labels_cannot_be_hidden_from_a_model_that_names_none():
    with pytest.raises(BadInputError, match="label_dropout needs a label that stands for none, and the model has"):
        DiffusionTask(nn.Identity())
    DiffusionTask(nn.Identity(), label_dropout=0.0)
