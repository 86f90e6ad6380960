"""Noise schedules of diffusion: the share of signal at each timestep, and conversions between predictions.

x_t = a x_0 + s e with a^2 = alpha_bar(t), s^2 = 1 - alpha_bar(t) (Ho et al. 2020), and v = a e - s x_0 (Salimans & Ho
2022). So with x_t, each of x_0, e and v gives the other two.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from baoc.errors import unknown_name

SCHEDULES = ("cosine", "linear")
PREDICTIONS = ("epsilon", "v")
Prediction = Literal["epsilon", "v"]


class NoiseSchedule:
    """alpha_bar at each timestep: 0 is nearly clean, the last one nearly noise.

    `cosine`: Nichol & Dhariwal 2021, with its offset of .008 and betas of at most .999; `linear`: betas from 1e-4 to
    .02 over 1,000 steps (Ho et al. 2020), scaled up for fewer steps. `alpha_bars`: float64 (num_steps,) on the CPU.
    """

    def __init__(self, name: str = "cosine", *, num_steps: int = 1000):
        if name not in SCHEDULES:
            raise unknown_name(name, what="noise schedule", allowed=SCHEDULES)
        self.num_steps = num_steps
        if name == "cosine":
            steps = torch.arange(num_steps + 1, dtype=torch.float64) / num_steps
            alpha_bars = ((steps + 0.008) / 1.008 * math.pi / 2).cos().square()
            betas = 1 - alpha_bars[1:] / alpha_bars[:-1]
        else:
            scale = 1000 / num_steps
            betas = torch.linspace(1e-4 * scale, 0.02 * scale, num_steps, dtype=torch.float64)
        self.alpha_bars = (1 - betas.clamp(max=0.999)).cumprod(0)
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def signal_and_noise(self, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        """(a, s) as float32 (B, 1, 1, 1) on the device of `timesteps` (B,)."""
        device = timesteps.device
        if device not in self._tables:
            signal, noise = self.alpha_bars.sqrt(), (1 - self.alpha_bars).sqrt()
            self._tables[device] = (signal.float().to(device), noise.float().to(device))
        signal, noise = self._tables[device]
        return signal[timesteps].view(-1, 1, 1, 1), noise[timesteps].view(-1, 1, 1, 1)

    def add_noise(self, clean: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """x_t, computed in float32, in the dtype of `clean`."""
        a, s = self.signal_and_noise(timesteps)
        return (a * clean.float() + s * noise.float()).to(clean.dtype)

    def velocity(self, clean: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """v, float32."""
        a, s = self.signal_and_noise(timesteps)
        return a * noise.float() - s * clean.float()

    def split(
        self, noisy: Tensor, predicted: Tensor, timesteps: Tensor, *, prediction: Prediction
    ) -> tuple[Tensor, Tensor]:
        """(x_0, e) that a prediction implies, float32."""
        a, s = self.signal_and_noise(timesteps)
        noisy, predicted = noisy.float(), predicted.float()
        if prediction == "v":
            return a * noisy - s * predicted, s * noisy + a * predicted
        return (noisy - s * predicted) / a, predicted
