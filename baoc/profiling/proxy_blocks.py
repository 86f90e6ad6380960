"""Small blocks that benchmark steps update in place of a network's own, to time the host's part of an optimizer step.

On a GPU a small step is limited by the host, with gradient release by the hooks in its backward pass. The host's time
depends on the numbers of tensors and blocks and on their specs, hardly on sizes. So a corner of each parameter is
stepped, and weights and states of the network do not change. The device's part is in the latency table.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from baoc.core.catalogue import with_placement
from baoc.core.recipes import FALLBACK
from baoc.errors import BadInputError
from baoc.optim import BlockwiseOptimizer, GradientRelease, groups
from baoc.optim.backends import proxy_backend
from baoc.planning.cost import grouped_bytes
from baoc.types import Block, OptimizerSpec, Placement, Role

SIDE = 16  # elements of a corner per dimension at most: all corners of a large network take a few MiB


class ProxyBlocks:
    """One tensor of at most SIDE elements per dimension for each trainable tensor in `blocks`, on its device.

    Call `finish` at the end of each step and, with `release`, `gradient_ready` for each final gradient of the network.
    Kernels are compiled on construction; those of groups follow the order of the first backward.

    Args:
        specs: the spec of each block. States of blocks placed on the host stay on the device here.
        release: settings of gradient release; None without it.
    """

    def __init__(
        self, blocks: Sequence[Sequence[Tensor]], *, specs: Sequence[OptimizerSpec], release: GradientRelease | None
    ):
        self._small: dict[Tensor, nn.Parameter] = {}
        proxy_blocks, named, spec_of = [], [], {}
        for number, (block, spec) in enumerate(zip(blocks, specs, strict=True)):
            corners = [(f"{number}.{index}", param) for index, param in enumerate(block) if param.requires_grad]
            for name, param in corners:
                self._small[param] = small = _corner(param)
                named.append((name, small))
            infos = tuple(groups.param_info(name, self._small[param], group=0) for name, param in corners)
            if infos:
                proxy_blocks.append(Block(name=str(number), params=infos, role=Role.OTHER))
                spec_of[str(number)] = _on_device(spec, block=proxy_blocks[-1])
        numel = sum(param.numel() for param in self._small)
        names = {proxy_backend(spec, device=next(iter(self._small)).device, numel=numel) for spec in spec_of.values()}
        decayed = [pair for pair in named if pair[1].ndim > 1]
        plain = [pair for pair in named if pair[1].ndim <= 1]
        param_groups = [(decayed, 0.01), (plain, 0.0)]
        self.optimizer = BlockwiseOptimizer(
            [{"params": pairs, "weight_decay": decay} for pairs, decay in param_groups if pairs],
            spec_of,
            blocks=proxy_blocks,
            backend=names.pop() if len(names) == 1 else "auto",
            release=release is not None,
        )
        self.optimizer.registry.graphs = False  # memory may be short, see `build_backward_backend`
        self._releaser = self.optimizer.releaser
        if self._releaser is not None and release is not None:
            # Not by the constructor, which would repeat the messages of the run's own optimizer.
            self._releaser.settings = release
            self._releaser.gradient_bytes = {small: param.nbytes for param, small in self._small.items()}
            if self._releaser.group_bytes_limit:
                self._releaser.group_bytes_limit = grouped_bytes(sum(self._releaser.gradient_bytes.values()))
        self._grads = {small: torch.full_like(small, 1e-3) for small in self._small.values()}
        self.compile()

    def gradient_ready(self, param: Tensor) -> None:
        """Steps the corner of `param`, whose gradient is final. Ignores a second gradient, which training refuses."""
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
        """Steps once. With gradient release, blocks are stepped one by one: groups are compiled by the first step."""
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
    """A corner of `param`, float32 for 16-bit parameters: the spec casts it to 16 bits if it keeps weights so."""
    dtype = torch.float32 if param.element_size() < 4 else param.dtype
    shape = tuple(min(SIDE, size) for size in param.shape)
    return nn.Parameter(torch.full(shape, 0.02, dtype=dtype, device=param.device))


def _on_device(spec: OptimizerSpec, *, block: Block) -> OptimizerSpec:
    """`spec` placed on the device; FALLBACK if it does not apply to `block`."""
    spec = with_placement(spec, Placement.DEVICE)
    try:
        groups.check_applies(spec, block=block)
    except BadInputError:
        return groups.resolve_spec(FALLBACK)
    return spec
