"""The values that cross a stage line: frozen, keyword-only, free of torch, and writable as JSON by `to_plain`.

One run is a chain of these (README, "One run as data"); a stage reads the values before it and returns one more.
"""

from baoc.types.decision import (
    Allocation,
    Budget,
    Candidate,
    Cost,
    Footprint,
    GradientStats,
    LatencyTable,
    Limits,
    Moments,
    Plan,
    Profile,
    Reason,
    Risk,
)
from baoc.types.network import Block, ImageDataSpec, ParamInfo, Role, matrix_shape
from baoc.types.outcome import BlockMove, FailedRun, FrontierPoint, Quality, Reallocation, RunResult
from baoc.types.plain import profile_from_plain, to_plain
from baoc.types.specs import Axis, CodecInfo, OptimizerSpec, RuleInfo, StateDecl, StateKind, StateLayout, StorageScheme

__all__ = [
    "Allocation",
    "Axis",
    "Block",
    "BlockMove",
    "Budget",
    "Candidate",
    "CodecInfo",
    "Cost",
    "FailedRun",
    "Footprint",
    "FrontierPoint",
    "GradientStats",
    "ImageDataSpec",
    "LatencyTable",
    "Limits",
    "Moments",
    "OptimizerSpec",
    "ParamInfo",
    "Plan",
    "Profile",
    "Quality",
    "Reallocation",
    "Reason",
    "Risk",
    "Role",
    "RuleInfo",
    "RunResult",
    "StateDecl",
    "StateKind",
    "StateLayout",
    "StorageScheme",
    "matrix_shape",
    "profile_from_plain",
    "to_plain",
]
