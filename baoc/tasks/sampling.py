"""Images from noise: DDIM (Song et al. 2021, eta = 0) and DDPM (Ho et al. 2020) over a part of the timesteps.

The two differ in how much fresh noise a step adds: none, or as much as the forward process would have.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from baoc.tasks.noise import NoiseSchedule, Prediction

SAMPLERS = ("ddim", "ddpm")
Sampler = Literal["ddim", "ddpm"]
Denoiser = Callable[[Tensor, Tensor, Tensor], Tensor]  # noisy (B, C, S, S), timesteps (B,), labels (B,) -> prediction


def spaced_timesteps(num_timesteps: int, *, num_steps: int) -> list[int]:
    """`num_steps` of the timesteps, evenly spaced, from the noisiest to 0."""
    steps = torch.linspace(num_timesteps - 1, 0, min(num_steps, num_timesteps), dtype=torch.float64)
    return [int(step) for step in steps.round()]


def sample(
    model: Denoiser,
    labels: Tensor,
    *,
    shape: tuple[int, int, int],
    schedule: NoiseSchedule,
    prediction: Prediction = "epsilon",
    sampler: Sampler = "ddim",
    num_steps: int = 50,
    guidance: float = 1.0,
    null_label: int | None = None,
    clip: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """(B, *shape) float32, one image per label, on the device of `labels`; `generator` is a CPU one, so that the noise
    is the same on every device.

    `guidance` g above 1 moves each prediction from that without a label to that with it and beyond: e_null + g (e -
    e_null), a second forward per step (Ho & Salimans 2022). `clip` holds the estimate of x_0 inside [-1, 1] where the
    data lie: without it the first steps of a cosine schedule, which divide by nearly 0, go astray. Without
    `null_label` guidance is ignored. Gradients are recorded unless the caller disables them.
    """
    start = torch.randn(len(labels), *shape, generator=generator)
    images = start.to(labels.device)
    timesteps = spaced_timesteps(schedule.num_steps, num_steps=num_steps)
    for step, earlier in zip(timesteps, [*timesteps[1:], None], strict=True):
        at = torch.full_like(labels, step)
        clean, eps = schedule.split(images, model(images, at, labels), at, prediction=prediction)
        if guidance != 1 and null_label is not None:
            nulls = torch.full_like(labels, null_label)
            _, without = schedule.split(images, model(images, at, nulls), at, prediction=prediction)
            eps = without + guidance * (eps - without)
            clean, _ = schedule.split(images, eps, at, prediction="epsilon")
        if clip:
            clean = clean.clamp(-1, 1)
            a, s = schedule.signal_and_noise(at)
            eps = (images - a * clean) / s
        images = _step(images, clean, eps, at, earlier, schedule=schedule, sampler=sampler, generator=generator)
    return images


def _step(
    images: Tensor,
    clean: Tensor,
    noise: Tensor,
    timesteps: Tensor,
    earlier: int | None,
    *,
    schedule: NoiseSchedule,
    sampler: Sampler,
    generator: torch.Generator | None,
) -> Tensor:
    """From x_t to x at the `earlier` timestep; to the estimate of x_0 where there is none."""
    if earlier is None:
        return clean
    a, s = schedule.signal_and_noise(timesteps)
    next_a, next_s = schedule.signal_and_noise(torch.full_like(timesteps, earlier))
    if sampler == "ddim":
        return next_a * clean + next_s * noise
    deviation = next_s / s * (1 - (a / next_a).square()).sqrt()  # of the posterior q(x_earlier | x_t, x_0)
    fresh = torch.randn(images.shape, generator=generator).to(images.device)
    return next_a * clean + (next_s.square() - deviation.square()).clamp_min(0).sqrt() * noise + deviation * fresh
