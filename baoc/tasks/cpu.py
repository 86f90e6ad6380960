"""What a process must set before it trains on a CPU."""

import torch


def prepare_cpu() -> bool:
    """Flush denormal numbers to zero; False where the CPU cannot.

    A run that has diverged to chance fills its state with denormals and then takes 6 to 8 times as long per step. The
    setting belongs to a thread and is inherited by those it starts: call this before the first tensor is computed.
    """
    return torch.set_flush_denormal(True)
