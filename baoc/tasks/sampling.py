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
    """Draws images (B, *shape), float32, one per label (B,), on the device of `labels`.

    Gradients are recorded unless the caller disables them.

    Args:
        guidance: g other than 1 extrapolates the noise from the prediction without a label to that with it:
            e_null + g (e - e_null), by a second forward per step (Ho & Salimans 2022). Ignored without `null_label`.
        clip: keeps the estimate of x_0 inside [-1, 1], where the data lie. Without it the first steps of a cosine
            schedule, which divide by nearly 0, would diverge.
        generator: of the CPU, so that the noise is the same on every device.
    """
    images = torch.randn(len(labels), *shape, generator=generator).to(labels.device)
    timesteps = spaced_timesteps(schedule.num_steps, num_steps=num_steps)
    for timestep, next_timestep in zip(timesteps, [*timesteps[1:], None], strict=True):
        t = torch.full_like(labels, timestep)
        clean, eps = schedule.split(images, model(images, t, labels), t, prediction=prediction)
        if guidance != 1 and null_label is not None:
            nulls = torch.full_like(labels, null_label)
            _, eps_null = schedule.split(images, model(images, t, nulls), t, prediction=prediction)
            eps = eps_null + guidance * (eps - eps_null)
            clean, _ = schedule.split(images, eps, t, prediction="epsilon")  # x_0 of the guided noise
        if clip:
            clean = clean.clamp(-1, 1)
            a, s = schedule.signal_and_noise(t)
            eps = (images - a * clean) / s
        images = _step(images, clean, eps, t, next_timestep, schedule=schedule, sampler=sampler, generator=generator)
    return images


def _step(
    images: Tensor,
    clean: Tensor,
    eps: Tensor,
    t: Tensor,
    next_timestep: int | None,
    *,
    schedule: NoiseSchedule,
    sampler: Sampler,
    generator: torch.Generator | None,
) -> Tensor:
    """From x_t to x at the next, less noisy timestep; to `clean`, the estimate of x_0, after the last one."""
    if next_timestep is None:
        return clean
    a, s = schedule.signal_and_noise(t)
    next_a, next_s = schedule.signal_and_noise(torch.full_like(t, next_timestep))
    if sampler == "ddim":
        return next_a * clean + next_s * eps
    deviation = next_s / s * (1 - (a / next_a).square()).sqrt()  # of the posterior q(x_next | x_t, x_0)
    noise = torch.randn(images.shape, generator=generator).to(images.device)
    return next_a * clean + (next_s.square() - deviation.square()).clamp_min(0).sqrt() * eps + deviation * noise
