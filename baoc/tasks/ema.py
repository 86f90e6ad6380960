"""Exponential moving averages of the weights, as a callback that tasks add to the Trainer.

After each optimizer step average <- average + (1 - d)(weight - average), d = min(decay, (1 + n) / (10 + n)) after n
steps, so that a short run forgets its random start too (the warm-up of Polyak averaging in TensorFlow's moving
averages). Averages are always float32, and include the corrections that bf16 weights keep in optimizer state.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from baoc.errors import BadInputError, CheckpointError
from baoc.optim import BlockwiseOptimizer
from baoc.optim.shards import Shard, is_sharded, local_shard, reshard, shard_of, unsharded_on_rank_0
from baoc.optim.weights import CORRECTION, SIXTEEN_BIT_DTYPES, master
from baoc.parallel import refusal

CHUNK = 2**22  # elements of a bf16 weight that are converted to float32 at a time
ALIGNMENT = 4  # float32 values; every average starts at a multiple of 16 bytes
TRUE_16_BIT = ("bf16-true", "16-true")  # precisions in which modules only accept inputs of their own 16-bit dtype


class EmaWeights(L.Callback):
    """Averages of a module's trainable parameters, which replace the weights during validation and test.

    Not Lightning's `EMAWeightAveraging`, which averages in the weights' dtype and does not see corrections.

    The averages lie in one tensor on the module's device, `nbytes` long. `swapped(module)` makes the parameters point
    to the averages, without a copy unless the module needs 16 bits. Checkpoints hold the averages by parameter name,
    under `callbacks`, key "EmaWeights".

    Sharded parameters: each rank averages its rows, checkpoints hold them unsharded, and weights and averages swap
    contents, because FSDP all-gathers from the parameter's own storage.
    """

    def __init__(self, decay: float):
        if not 0 < decay < 1:
            raise BadInputError(f"ema_decay must be above 0 and below 1 (0 keeps no average), not {decay}")
        self.decay = decay
        self.num_updates = 0
        self.averages: dict[str, Tensor] = {}
        self.tracked: Callable[[], AbstractContextManager[Any]] = nullcontext  # wraps averaging, to measure memory
        self._module_is_16_bit = False
        self._last_step = -1
        self._pending: Mapping[str, Any] | None = None  # a loaded state dict, until `start` knows the parameters
        self._weights: dict[str, Tensor] = {}  # data of the weights while they are swapped with the averages
        self._shards: dict[str, Shard] = {}

    @property
    def state_key(self) -> str:
        return "EmaWeights"

    # -- memory -----------------------------------------------------------------------------------------------------

    @staticmethod
    def nbytes(module: nn.Module) -> int:
        return 4 * sum(_padded(local_shard(p).numel()) for p in module.parameters() if p.requires_grad)

    def validation_bytes(self, module: nn.Module) -> int:
        """Bytes that validation needs in addition: 16-bit copies, for modules that only accept 16 bits."""
        if not self._module_is_16_bit:
            return 0
        params_16_bit = [p for p in module.parameters() if p.requires_grad and p.dtype in SIXTEEN_BIT_DTYPES]
        return sum(local_shard(p).nbytes for p in params_16_bit)

    def buffers(self) -> list[Tensor]:
        """All tensors that the averages take on the device now."""
        return [*self.averages.values(), *self._weights.values()]

    # -- averaging --------------------------------------------------------------------------------------------------

    def start(self, module: nn.Module) -> None:
        """Allocates the averages, with the values of a loaded checkpoint or of the current weights."""
        params = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._shards = {name: shard for name, p in params.items() if (shard := shard_of(p)) is not None}
        local_params = {name: local_shard(p.detach()) for name, p in params.items()}
        if not local_params or self.averages.keys() == local_params.keys():
            return
        saved = self._pending["averages"] if self._pending is not None else self.averages
        self.num_updates = int(self._pending["num_updates"]) if self._pending is not None else self.num_updates
        device = next(iter(local_params.values())).device
        buffer = torch.empty(self.nbytes(module) // 4, dtype=torch.float32, device=device)
        averages, start = {}, 0
        for name, param in local_params.items():
            averages[name] = buffer[start : start + param.numel()].view(param.shape)
            start += _padded(param.numel())
            values = _checked_shape(saved[name], params[name], name=name) if name in saved else param
            if name in saved and name in self._shards:
                values = self._shards[name].local_part(values, shape=param.shape)
            averages[name].copy_(values)
        self.averages, self._pending = averages, None

    @torch.no_grad()
    def update(self, module: nn.Module, *, optimizer: Optimizer | None = None) -> None:
        """Updates the averages with the weights after a step; `optimizer` holds the corrections of bf16 weights."""
        self.start(module)
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        self.num_updates += 1
        states = {} if optimizer is None else optimizer.state
        if isinstance(optimizer, BlockwiseOptimizer):  # `optimizer.state` would not have states on the host
            states = optimizer.registry.synchronized_states()
        fp32_weights: list[Tensor] = []
        their_averages: list[Tensor] = []
        for name, parameter in module.named_parameters():
            average = self.averages.get(name)
            if average is None or not parameter.requires_grad:
                continue
            parameter = local_shard(parameter)
            state = states.get(parameter, {})
            if parameter.dtype is torch.float32 and CORRECTION not in state:
                fp32_weights.append(parameter.detach())
                their_averages.append(average)
            else:
                _lerp_in_chunks_(average, parameter.detach(), state=state, weight=1 - decay)
        if fp32_weights:
            torch._foreach_lerp_(their_averages, fp32_weights, 1 - decay)  # pyright: ignore[reportPrivateImportUsage]

    @contextmanager
    def swapped(self, module: nn.Module) -> Iterator[None]:
        """Inside, the module's weights are the averages."""
        self.swap_in(module)
        try:
            yield
        finally:
            self.swap_out(module)

    def swap_in(self, module: nn.Module) -> None:
        reshard(module)
        if self._pending is not None:
            self.start(module)
        if self._weights:
            return
        for name, parameter in module.named_parameters():
            if name in self._shards:
                self._weights[name] = self.averages[name]
                _swap_contents_(local_shard(parameter.detach()), self.averages[name])
            elif name in self.averages:
                self._weights[name] = parameter.data
                average = self.averages[name]
                parameter.data = average.to(parameter.dtype) if self._module_is_16_bit else average

    def swap_out(self, module: nn.Module) -> None:
        if self._weights:
            reshard(module)  # unsharded copies still hold the averages
        for name, parameter in module.named_parameters():
            if name in self._weights and name in self._shards:
                _swap_contents_(local_shard(parameter.detach()), self.averages[name])
            elif name in self._weights:
                parameter.data = self._weights[name]
        self._weights = {}

    # -- Lightning --------------------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._module_is_16_bit = trainer.precision in TRUE_16_BIT
        if self._module_is_16_bit and any(map(is_sharded, pl_module.parameters())):
            raise refusal("averaged_narrow", precision=trainer.precision)
        if stage == "fit":
            self.averages, self.num_updates, self._pending = {}, 0, None  # another fit; a checkpoint is loaded later

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.start(pl_module)
        self._last_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step != self._last_step:  # else micro-batches are still accumulated
            self._last_step = trainer.global_step
            with self.tracked():
                self.update(pl_module, optimizer=trainer.optimizers[0])

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.swap_in(pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.swap_out(pl_module)

    on_test_start, on_test_end = on_validation_start, on_validation_end

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.swap_out(pl_module)

    def state_dict(self) -> dict[str, Any]:
        if self._pending is not None:
            return dict(self._pending)
        assert not self._weights, "a checkpoint during validation would hold the averages as weights"
        return {"num_updates": self.num_updates, "averages": self.unsharded()}

    def unsharded(self) -> dict[str, Tensor]:
        """The averages by parameter name. Sharded ones are gathered to rank 0's CPU, a collective on all ranks."""
        averages, shards = dict(self.averages), self._shards
        for name in [name for name in averages if name in shards]:
            averages[name] = shards[name].as_dtensor(averages[name], shape=shards[name].param.shape)
        return unsharded_on_rank_0(averages) if shards else averages

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._pending, self.averages = state_dict, {}


def _swap_contents_(a: Tensor, b: Tensor) -> None:
    copy = a.clone()
    a.copy_(b)
    b.copy_(copy)


def _padded(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


def _checked_shape(average: Tensor, parameter: Tensor, *, name: str) -> Tensor:
    if average.shape != parameter.shape:
        raise CheckpointError(
            f"the average of {name} in the checkpoint has shape {tuple(average.shape)}, the parameter has "
            f"{tuple(parameter.shape)}: resume with the model of that run"
        )
    return average


def _lerp_in_chunks_(average: Tensor, parameter: Tensor, *, state: Mapping[str, Tensor], weight: float) -> None:
    """Updates an average with the exact values of a 16-bit parameter, in chunks, without a float32 copy of it."""
    if not parameter.is_contiguous():
        here = {key: state[key].to(parameter.device) for key in (CORRECTION,) if key in state}
        average.lerp_(master(parameter, here).float(), weight)
        return
    corrections = {CORRECTION: state[CORRECTION].view(-1)} if CORRECTION in state else {}
    values, target = parameter.view(-1), average.view(-1)
    for start in range(0, len(values), CHUNK):
        part = slice(start, start + CHUNK)
        exact = master(values[part], {key: tensor[part].to(values.device) for key, tensor in corrections.items()})
        target[part].lerp_(exact.float(), weight)
