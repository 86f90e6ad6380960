# pyright: reportUnusedImport=false
"""The values that stages hand to each other: frozen, keyword-only, free of torch, and written as JSON by `to_plain`.

A run is a chain of them (docs/runs.md): each stage reads the values before it and returns one more.
"""

from baoc.types.decision import (
    Allocation,
    Basis,
    Budget,
    Candidate,
    Cost,
    Footprint,
    GradientStats,
    LatencyTable,
    Limits,
    LinkRates,
    Moments,
    PeakInterval,
    Plan,
    Profile,
    Reason,
    Risk,
)
from baoc.types.network import (
    IGNORE_INDEX,
    Block,
    DataSpec,
    ImageDataSpec,
    OwnDataSpec,
    ParamInfo,
    Part,
    Role,
    TextDataSpec,
    matrix_shape,
)
from baoc.types.option import Option
from baoc.types.outcome import RESULT_SCHEMA, BlockMove, FailedRun, FrontierPoint, Quality, Reallocation, RunResult
from baoc.types.plain import read_plain, to_plain
from baoc.types.specs import (
    CodecInfo,
    OptimizerSpec,
    Placement,
    RuleInfo,
    Scaling,
    StateDecl,
    StateKind,
    StateLayout,
    StorageScheme,
    WeightsInfo,
)
