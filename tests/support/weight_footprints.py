"""A footprint of four layers whose parameters can be kept in bf16."""

from baoc.types import Footprint, ParamInfo, PeakInterval, Role
from tests.support.planners import NO_TEMPORARIES

MIB = 2**20

PARAMS = [
    ParamInfo(name=f"layers.{i}.mlp.weight", shape=(512, 512), dtype="float32", role=Role.MLP, depth=i)
    for i in range(4)
]

NUMEL = 512 * 512

WEIGHTS = 4 * 4 * NUMEL  # of four layers in fp32; their gradients are as many

COPIES = {param.name: 2 * NUMEL for param in PARAMS}

NAMES = tuple(param.name for param in reversed(PARAMS))

FOOTPRINT = Footprint(
    device="cpu",
    micro_batch=8,
    weights_bytes=WEIGHTS,
    gradients_bytes=WEIGHTS,
    forward_backward_bytes=2 * WEIGHTS + 8 * MIB,
    validation_bytes=0,
    resident_bytes=2 * WEIGHTS,
    intervals=(
        PeakInterval(name="training", num_bytes=2 * WEIGHTS + 8 * MIB, gradients=None, copies=COPIES),
        PeakInterval(name="training", num_bytes=WEIGHTS + 11 * MIB, gradients=2),
    ),
    gradient_order=NAMES,
    step_temporary_bytes=NO_TEMPORARIES,
)
