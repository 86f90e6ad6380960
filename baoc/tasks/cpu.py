"""Settings of a process that trains on a CPU."""

import torch


def prepare_cpu() -> bool:
    """Flushes denormal numbers to zero; returns False if the CPU cannot.

    A run that diverged to chance level fills its states with denormals, and its steps then take 6 to 8 times as long.
    The setting belongs to a thread and is inherited by threads it starts, so call this before the first computation.
    """
    return torch.set_flush_denormal(True)
