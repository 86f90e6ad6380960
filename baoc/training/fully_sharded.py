"""The Lightning strategy of fully_shard (FSDP2) that trains inside a budget.

Processes and their mesh come from Lightning's ModelParallelStrategy. The order is that of one device: a checkpoint is
loaded into the unsharded module on the host; then the module is sharded layer by layer, measured and planned for. So a
checkpoint is one file, as of one device.
"""

from collections.abc import Mapping
from typing import Any, Literal, cast

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.optim import Optimizer

from baoc.errors import BadInputError
from baoc.models.pretrained import remember_origin
from baoc.models.switches import recomputable_layers
from baoc.optim.shards import is_sharded, reshard, unsharded_on_rank_0
from baoc.parallel import ranks, refusal
from baoc.training.lightning import BudgetedStrategy, RanksStrategy
from baoc.training.session import Resharding
from baoc.training.user_optimizer import averaging_callbacks, check_arguments
from baoc.types import Budget


class _OneFile(ModelParallelStrategy):
    """ModelParallelStrategy with a one-dimensional mesh and one-device checkpoints, which rank 0 writes."""

    restore_checkpoint_after_setup: bool = False  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]
    lightning_restore_optimizer: bool = True  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]

    def setup_environment(self) -> None:
        self._setup_distributed()
        self._device_mesh = one_mesh(self.root_device)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    def setup(self, trainer: L.Trainer) -> None:
        super(ModelParallelStrategy, self).setup(trainer)  # ModelParallelStrategy's own requires configure_model

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return unsharded_on_rank_0(self.lightning_module.state_dict())

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        options = StateDictOptions(full_state_dict=True, strict=strict)
        if any(map(is_sharded, self.lightning_module.parameters())):
            set_model_state_dict(self.lightning_module, checkpoint["state_dict"], options=options)
        else:
            self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return unsharded_on_rank_0(getattr(optimizer, "_optimizer", optimizer).state_dict())

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return super(ModelParallelStrategy, self).load_checkpoint(checkpoint_path, weights_only)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        super(ModelParallelStrategy, self).save_checkpoint(checkpoint, filepath, storage_options)


def one_mesh(device: torch.device) -> DeviceMesh:
    """A mesh of all ranks in one dimension. It uses the default group; another group would allocate its own buffers."""
    return init_device_mesh(device.type, (ranks().size,), mesh_dim_names=("data_parallel",))


def cut(module: L.LightningModule, *, mesh: DeviceMesh, device: torch.device, precision: str) -> None:
    """Shards the module by fully_shard: the repeated layers of each child, then the child.

    Each is moved to `device` with rank 0's values first. The module remembers whether its weights are pretrained.
    """
    remember_origin(module)
    policy = MixedPrecisionPolicy()
    if precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for child in module.children():
        layers = recomputable_layers(child) if any(True for _ in child.parameters()) else []
        for part in (*layers, child):
            part.to(device)
            ranks().broadcast_tensors(
                tensor for tensor in (*part.parameters(), *part.buffers()) if not is_sharded(tensor)
            )
            if any(True for _ in part.parameters()):
                fully_shard(part, mesh=mesh, mp_policy=policy)
        if layers and hasattr(child, "features"):  # a chunked loss calls it in place of forward
            register_fsdp_forward_method(child, "features")


class BaocFSDPStrategy(RanksStrategy, _OneFile):
    """BaocStrategy over fully_shard: `L.Trainer(devices=2, strategy=BaocFSDPStrategy(budget="8gb"))`.

    The budget is that of each device, and so are all bytes that are told: a rank holds its rows of weights, gradients
    and states, and the layers that are gathered in full. A module that does not call `fully_shard` in its
    `configure_model` is cut here: the repeated layers of each of its children, then the child. Under bf16-mixed layers
    are gathered in bfloat16, and gradients are averaged in float32.

    `budget` and the named arguments are BaocStrategy's, without `device`; others are those of ModelParallelStrategy.

    Args:
        reshard_after_forward: False keeps layers in full between forward and backward, which takes more memory and a
            message per layer less; "auto" does so where a memory budget holds a plan as good then.
    """

    strategy_name = "baoc_fsdp"
    display_name = "BaocFSDPStrategy"

    def __init__(
        self,
        budget: str | int | float | Mapping[str, Any] | Budget = "auto",
        *,
        reshard_after_forward: bool | Literal["auto"] = "auto",
        **settings: Any,
    ):
        check_arguments(settings, BaocFSDPStrategy, BudgetedStrategy, ModelParallelStrategy)
        super().__init__(budget, save_distributed_checkpoint=False, **settings)
        self.reshard_after_forward = reshard_after_forward
        self._layers: list[FSDPModule] = []  # whose reshard_after_forward is decided here

    def model_to_device(self) -> None:
        """Shards the module from CPU memory, so that no device ever holds it unsharded."""
        module = self.lightning_module
        assert module is not None
        users_own = any(map(is_sharded, module.parameters())) and is_overridden("configure_model", module)
        if not any(map(is_sharded, module.parameters())):
            cut(module, mesh=self.device_mesh, device=self.root_device, precision=str(module.trainer.precision))
        if users_own and self.reshard_after_forward != "auto":
            raise BadInputError(
                f"reshard_after_forward={self.reshard_after_forward} was given to BaocFSDPStrategy, and "
                f"configure_model of {type(module).__name__} calls fully_shard itself: give it there, or leave one out"
            )
        self._layers = []
        for child in module.children() if not users_own else ():
            layers = recomputable_layers(child)
            self._layers += [layer for layer in layers if isinstance(layer, FSDPModule) and layer is not child]
        if self.reshard_after_forward != "auto":
            self._reshard(bool(self.reshard_after_forward))
        elif self._layers:
            narrow = torch.bfloat16.itemsize if module.trainer.precision == "bf16-mixed" else None
            params = [param for layer in self._layers for param in cast(nn.Module, layer).parameters()]
            num_bytes = sum(param.numel() * (narrow or param.element_size()) for param in params)
            self._resharding = Resharding(switch=self._reshard, num_bytes=num_bytes)
        unsharded = [name for name, param in module.named_parameters() if not is_sharded(param)]
        if unsharded:
            raise refusal("left_whole", names=", ".join(unsharded[:3]))
        if any(tensor.device != self.root_device for tensor in (*module.parameters(), *module.buffers())):
            module.to(self.root_device)  # only if needed: it replaces parameters, which a search may have used already

    def _reshard(self, reshards: bool) -> None:
        for layer in self._layers:
            layer.set_reshard_after_forward(reshards, recurse=False)

    def on_validation_end(self) -> None:
        assert self.lightning_module is not None
        reshard(self.lightning_module)

    def evaluator(self) -> SingleDeviceStrategy:
        return _EvaluatorInPlace(self.root_device)

    def _refuse_unsupported(self, trainer: L.Trainer) -> None:
        super()._refuse_unsupported(trainer)
        if averaging := averaging_callbacks(trainer):
            raise BadInputError(
                f"{', '.join(averaging)} copies the module to average its weights, of which a rank has only rows under "
                "fully_shard: use baoc.tasks.ema.EmaWeights, or BaocDDPStrategy"
            )


class _EvaluatorInPlace(SingleDeviceStrategy):
    """Evaluates a module on all ranks together, and leaves it on its device and in its types."""

    def setup(self, trainer: L.Trainer) -> None:
        # Converting would swap each DTensor for a new one, and torch refuses that while its engine refers to the old.
        self.precision_plugin.convert_module = lambda module: module  # pyright: ignore[reportAttributeAccessIssue]
        super().setup(trainer)

    def model_to_device(self) -> None:
        pass

    def on_validation_end(self) -> None:
        assert self.lightning_module is not None
        reshard(self.lightning_module)

    def teardown(self) -> None:
        pass


StrategyRegistry.register(BaocFSDPStrategy.strategy_name, BaocFSDPStrategy, "trains inside budget=auto", override=True)
