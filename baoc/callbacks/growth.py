"""What a larger batch will need, from a forward pass of a small part of it: asked before the whole goes through."""

from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import Tensor

from baoc.callbacks.generators import capture_rng, restore_rng
from baoc.data.batches import resized
from baoc.types import Footprint


def grown(footprint: Footprint, *, micro_batch: int, saved_bytes: int = 0, largest_bytes: int = 0) -> Footprint:
    """The footprint of larger batches; smaller ones change nothing.

    `saved_bytes` is what autograd keeps of a forward pass of `footprint.micro_batch` samples, and `largest_bytes` its
    largest tensor: three of those stand for what backward holds for a moment. What was seen beside weights and
    gradients counts where it is more. All of it grows with the samples.
    """
    if not 0 < footprint.micro_batch < micro_batch:
        return footprint
    ratio = micro_batch / footprint.micro_batch
    fixed = footprint.weights_bytes + footprint.gradients_bytes
    seen = max(footprint.forward_backward_bytes - fixed, saved_bytes + 3 * largest_bytes, 0)
    data = max(footprint.resident_bytes - fixed, 0)
    return replace(
        footprint,
        micro_batch=micro_batch,
        forward_backward_bytes=fixed + int(seen * ratio),
        resident_bytes=min(footprint.resident_bytes, fixed) + int(data * ratio),
        intervals=(),  # they are of the smaller batch
    )


def saved_by_forward(trainer: L.Trainer, batch: Any, *, num_samples: int) -> tuple[int, int]:
    """Bytes that autograd keeps of a forward pass of the first `num_samples` of `batch`, and those of the largest.

    Parameters do not count. Generators, buffers, metrics and logs are as before.
    """
    strategy: Any = trainer.strategy
    module = trainer.lightning_module
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = max(found.get(storage.data_ptr(), 0), tensor.nbytes)
        return tensor

    generators = capture_rng(strategy.root_device)
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with strategy.silent(module), saving, strategy.precision_plugin.train_step_context():
            module.training_step(resized(batch, num_samples), 0)  # not through what averages gradients
    finally:
        restore_rng(generators)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    return sum(found.values()), max(found.values(), default=0)
