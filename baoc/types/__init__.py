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
    Moment,
    Moments,
    Plan,
    Profile,
    Reason,
    Risk,
)
from baoc.types.network import Block, DataSpec, ImageDataSpec, ParamInfo, Role, TextDataSpec, matrix_shape
from baoc.types.option import Option
from baoc.types.outcome import RESULT_SCHEMA, BlockMove, FailedRun, FrontierPoint, Quality, Reallocation, RunResult
from baoc.types.plain import profile_from_plain, to_plain
from baoc.types.specs import (
    Axis,
    CodecInfo,
    OptimizerSpec,
    RuleInfo,
    Scaling,
    StateDecl,
    StateKind,
    StateLayout,
    StorageScheme,
    WeightsInfo,
)

__all__ = [
    "RESULT_SCHEMA",
    "Allocation",
    "Axis",
    "Block",
    "BlockMove",
    "Budget",
    "Candidate",
    "CodecInfo",
    "Cost",
    "DataSpec",
    "FailedRun",
    "Footprint",
    "FrontierPoint",
    "GradientStats",
    "ImageDataSpec",
    "LatencyTable",
    "Limits",
    "Moment",
    "Moments",
    "OptimizerSpec",
    "Option",
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
    "Scaling",
    "StateDecl",
    "StateKind",
    "StateLayout",
    "StorageScheme",
    "TextDataSpec",
    "WeightsInfo",
    "matrix_shape",
    "profile_from_plain",
    "to_plain",
]
