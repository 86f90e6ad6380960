"""Whether a step has to be wrapped as torch wraps every optimizer's: for step hooks, and for profilers to see it."""

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def wanted(optimizer: Optimizer) -> bool:
    """True if somebody registered a hook for steps of this or of all optimizers, or profiles."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
    )
