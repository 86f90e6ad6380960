"""Small blocks that a rehearsal steps in place of a network's own, to time the host's part of an optimizer step.

On a GPU a small step waits for the host, and with gradient release for the hooks in its backward pass. The host's time
depends on the number of tensors and blocks and on their specs, hardly on sizes. So a corner of each parameter is
stepped, and the network's weights and states stay as they are. The device's part is in the latency table.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from baoc.core.catalogue import with_placement
from baoc.errors import BadInputError
from baoc.optim import BlockwiseOptimizer, GradientRelease, groups
from baoc.optim.backends import proxy_backend
from baoc.planning.cost import grouped_bytes
from baoc.types import Block, OptimizerSpec, Placement, Role

SIDE = 16  # elements of a corner per dimension at most: those of a large network are a few MiB together
FALLBACK = "adamw"  # where a spec cannot run on a corner


class ProxyBlocks:
    """One tensor of at most SIDE elements per dimension for each trainable tensor in `blocks`, on its device.

    Call `finish` at the end of each step and, with `release`, `gradient_ready` for each gradient of the network that
    is final. Kernels are compiled on construction; those of groups follow the order of the first backward.

    Args:
        specs: the spec of each block. States of host-placed blocks stay on the device here.
        release: settings of gradient release, how it clips among them; None without it.
    """

    def __init__(
        self, blocks: Sequence[Sequence[Tensor]], *, specs: Sequence[OptimizerSpec], release: GradientRelease | None
    ):
        self._small: dict[Tensor, nn.Parameter] = {}
        made, named, chosen = [], [], {}
        for number, (block, spec) in enumerate(zip(blocks, specs, strict=True)):
            corners = [(f"{number}.{index}", param) for index, param in enumerate(block) if param.requires_grad]
            for name, param in corners:
                self._small[param] = small = _corner(param)
                named.append((name, small))
            infos = tuple(groups.param_info(name, self._small[param], group=0) for name, param in corners)
            if infos:
                made.append(Block(name=str(number), params=infos, role=Role.OTHER))
                chosen[str(number)] = _on_device(spec, block=made[-1])
        numel = sum(param.numel() for param in self._small)
        names = {proxy_backend(spec, device=next(iter(self._small)).device, numel=numel) for spec in chosen.values()}
        decayed = [pair for pair in named if pair[1].ndim > 1]
        plain = [pair for pair in named if pair[1].ndim <= 1]
        parts = [(decayed, 0.01), (plain, 0.0)]
        self.optimizer = BlockwiseOptimizer(
            [{"params": pairs, "weight_decay": decay} for pairs, decay in parts if pairs],
            chosen,
            blocks=made,
            backend=names.pop() if len(names) == 1 else "auto",
            release=release is not None,
        )
        self.optimizer.registry.graphs = False  # room may be short, see `build_backward_backend`
        self._releaser = self.optimizer.releaser
        if self._releaser is not None and release is not None:
            self._releaser.settings = release  # not told again: the run's own optimizer says what it means
            self._releaser.gradient_bytes = {small: param.nbytes for param, small in self._small.items()}
            if self._releaser.group_bytes_limit:
                self._releaser.group_bytes_limit = grouped_bytes(sum(self._releaser.gradient_bytes.values()))
        self._grads = {small: torch.full_like(small, 1e-3) for small in self._small.values()}
        self.compile()

    def gradient_ready(self, param: Tensor) -> None:
        """Steps the small tensor of `param`, whose gradient is final. Ignores a second one: training refuses it."""
        small = self._small[param]
        assert self._releaser is not None
        if id(small) in self._releaser.params_with_gradient:
            return
        small.grad = self._grads[small]
        self._releaser.ready(small)

    def finish(self) -> None:
        """Ends the step as Lightning does."""
        self.optimizer.mask_nonfinite()
        self.optimizer.step()

    def compile(self) -> None:
        if self._releaser is None:
            for small, grad in self._grads.items():
                small.grad = grad
            self.finish()
            return
        together, self._releaser.group_bytes_limit = self._releaser.group_bytes_limit, 0
        for param in reversed(list(self._small)):
            self.gradient_ready(param)
        self.finish()
        self._releaser.group_bytes_limit = together


def _corner(param: Tensor) -> nn.Parameter:
    """In 32 bits where the parameter has 16 for now: its spec narrows it, if it is to be."""
    dtype = torch.float32 if param.element_size() < 4 else param.dtype
    shape = tuple(min(SIDE, size) for size in param.shape)
    return nn.Parameter(torch.full(shape, 0.02, dtype=dtype, device=param.device))


def _on_device(spec: OptimizerSpec, *, block: Block) -> OptimizerSpec:
    spec = with_placement(spec, Placement.DEVICE)
    try:
        groups.check_applies(spec, block=block)
    except BadInputError:
        return groups.resolve_spec(FALLBACK)
    return spec
