"""Denoising diffusion on images or latents with class labels."""

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from baoc.errors import BadInputError, unknown_name
from baoc.tasks.base import Task, seed_from_key
from baoc.tasks.noise import PREDICTIONS, NoiseSchedule, Prediction
from baoc.tasks.sample_grid import draw_sample_grid
from baoc.tasks.sampling import SAMPLERS, Sampler, sample
from baoc.types import ImageDataSpec

NUM_TIMESTEPS = 1000
VALIDATION_CHUNK = 64  # validation samples whose noise is drawn together
_GOLDEN_RATIO = (5**0.5 - 1) / 2


class DiffusionTask(Task):
    """Mean squared error of the prediction (`epsilon` or `v`) on batches `{"images", "labels"}`.

    `model(noisy, timesteps, labels)` returns the prediction as a tensor, or as attribute `sample` of its output, as
    networks of diffusers do. Label `null_label` stands for no label. Timesteps, noise and dropped labels of a training
    step depend only on `noise_seed`, the step and the micro-batch, so a resumed run repeats them. Global generators are
    not used.

    `val/mse` is the error of the noise for both predictions. Validation sample i has the same timestep and noise in
    every run and at every batch size. With `ema_decay`, validation uses the averaged weights.
    """

    quality: ClassVar[tuple[str, bool]] = ("val/mse", False)
    task_family = "diffusion"

    def __init__(
        self,
        model: nn.Module,
        *,
        prediction: Prediction = "epsilon",
        noise_schedule: str = "cosine",
        label_dropout: float = 0.1,
        noise_seed: int = 0,
        ema_decay: float = 0.9999,
        sampler: Sampler = "ddim",
        sample_steps: int = 50,
        guidance: float = 1.5,
        num_samples: int | None = None,
        **base: Any,
    ):
        """`base`: spec and optimizer, as `Task` takes them."""
        if prediction not in PREDICTIONS:
            raise unknown_name(prediction, what="prediction", allowed=PREDICTIONS)
        if sampler not in SAMPLERS:
            raise unknown_name(sampler, what="sampler", allowed=SAMPLERS)
        if not 0 <= label_dropout < 1:
            raise BadInputError(f"label_dropout must be at least 0 and below 1, not {label_dropout}")
        if sample_steps < 1 or guidance < 0 or (num_samples is not None and num_samples < 0):
            raise BadInputError(
                f"sample_steps={sample_steps}, guidance={guidance} and num_samples={num_samples}: steps must be 1 or "
                "more, guidance and samples 0 or more"
            )
        options: dict[str, Any] = {
            "prediction": prediction,
            "noise_schedule": noise_schedule,
            "label_dropout": float(label_dropout),
            "noise_seed": int(noise_seed),
            "ema_decay": float(ema_decay),
            "sampler": sampler,
            "sample_steps": int(sample_steps),
            "guidance": float(guidance),
            "num_samples": num_samples,
        }
        super().__init__(model, **options, **base)
        self.schedule = NoiseSchedule(noise_schedule, num_steps=NUM_TIMESTEPS)
        self.prediction: Prediction = prediction
        self.label_dropout = label_dropout
        self.null_label = self._null_label()
        self._generators: dict[torch.device, torch.Generator] = {}
        self.at = (0, 0)  # step and micro-batch of the current training batch
        self._num_validated = 0

    # -- training ---------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        step, micro_batch = self.at
        self.at = (step, micro_batch + 1) if step == self.global_step + 1 else (self.global_step + 1, 0)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch["images"], batch["labels"]
        generator = self.generator(images.device)
        timesteps = torch.randint(NUM_TIMESTEPS, labels.shape, generator=generator, device=images.device)
        noise = torch.randn(images.shape, generator=generator, device=images.device)
        if self.label_dropout:
            dropped = torch.rand(labels.shape, generator=generator, device=images.device) < self.label_dropout
            labels = labels.masked_fill(dropped, self.null_label)
        predicted = self.predict(self.schedule.add_noise(images, noise, timesteps), timesteps, labels)
        target = noise if self.prediction == "epsilon" else self.schedule.velocity(images, noise, timesteps)
        loss = F.mse_loss(predicted.float(), target.float())  # torch 2.11 has no backward for mixed dtypes
        self.log("train/loss", loss.detach(), prog_bar=True, sync_dist=True, batch_size=len(images))
        return loss

    def predict(self, noisy: Tensor, timesteps: Tensor, labels: Tensor) -> Tensor:
        """The model's prediction, (N, channels, height, width)."""
        output = self.model(noisy, timesteps, labels)
        predicted = getattr(output, "sample", output)
        if not isinstance(predicted, Tensor) or predicted.shape != noisy.shape:
            returned = tuple(predicted.shape) if isinstance(predicted, Tensor) else type(output).__name__
            raise BadInputError(
                f"the model returned {returned} and task diffusion needs a prediction of the images' shape "
                f"{tuple(noisy.shape)}: return it as a tensor, or as `sample` of what is returned"
            )
        return predicted

    def generator(self, device: torch.device) -> torch.Generator:
        """The task's generator on `device`, seeded for this training step and micro-batch."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        key = f"{self.hparams['noise_seed']}:{self.at[0]}:{self.at[1]}"
        return self._generators[device].manual_seed(seed_from_key(key))

    # -- validation -------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        self._num_validated = 0

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        images, labels = batch["images"], batch["labels"]
        start, self._num_validated = self._num_validated, self._num_validated + len(images)
        noise = fixed_noise(start, len(images), shape=tuple(images.shape[1:])).to(images.device)
        timesteps = fixed_timesteps(start, len(images)).to(images.device)
        noisy = self.schedule.add_noise(images, noise, timesteps)
        predicted = self.predict(noisy, timesteps, labels)
        _, predicted_noise = self.schedule.split(noisy, predicted, timesteps, prediction=self.prediction)
        self.log("val/mse", F.mse_loss(predicted_noise, noise), prog_bar=True, batch_size=len(images))

    # -- samples ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(self, labels: Tensor, *, shape: tuple[int, int, int], batch_size: int = 64) -> Tensor:
        """Draws images (N, *shape), float32 on the CPU, one per label (N,), `batch_size` at a time.

        It uses the current weights; `averaged()` replaces them by their averages. Images of 1 or 3 channels are clipped
        to [-1, 1].
        """
        settings, training = self.hparams, self.training
        dtype = next((param.dtype for param in self.parameters()), torch.float32)  # averages may have another one
        generator = torch.Generator().manual_seed(0)
        self.eval()
        images = [
            sample(
                lambda noisy, *others: self.predict(noisy.to(dtype), *others).float(),
                batch_labels.to(self.device),
                shape=shape,
                schedule=self.schedule,
                prediction=self.prediction,
                sampler=settings["sampler"],
                num_steps=settings["sample_steps"],
                guidance=settings["guidance"],
                null_label=self.null_label if self.label_dropout else None,
                clip=shape[0] in (1, 3),
                generator=generator,
            ).cpu()
            for batch_labels in labels.split(batch_size)
        ]
        self.train(training)
        return torch.cat(images)

    def conclude(self, data: Any, *, folder: Path) -> Path | None:
        """Writes samples.png to `folder` after a run; None if it is left out."""
        return draw_sample_grid(self, data, sample=self.sample, folder=folder, num_samples=self.hparams["num_samples"])

    def _null_label(self) -> int:
        if isinstance(self.spec, ImageDataSpec):
            return self.spec.num_classes
        null_label: Any = getattr(self.model, "null_label", None)
        if null_label is None and self.label_dropout:
            raise BadInputError(
                "label_dropout needs a label that stands for none, and the model has no attribute null_label: give the "
                "model that attribute, the task a spec, or label_dropout=0"
            )
        return -1 if null_label is None else int(null_label)


def fixed_noise(start: int, count: int, *, shape: tuple[int, ...]) -> Tensor:
    """Noise (count, *shape) of `count` validation samples from number `start` on, independent of the batch size."""
    first, last = start // VALIDATION_CHUNK, (start + count - 1) // VALIDATION_CHUNK
    generator = torch.Generator()
    chunks = [
        torch.randn(VALIDATION_CHUNK, *shape, generator=generator.manual_seed(chunk))
        for chunk in range(first, last + 1)
    ]
    offset = start - first * VALIDATION_CHUNK
    return torch.cat(chunks)[offset : offset + count]


def fixed_timesteps(start: int, count: int) -> Tensor:
    """Timesteps (count,) of the same samples: multiples of the golden ratio modulo 1, which cover all evenly."""
    positions = torch.arange(start + 1, start + count + 1, dtype=torch.float64) * _GOLDEN_RATIO % 1
    return (positions * NUM_TIMESTEPS).long()
