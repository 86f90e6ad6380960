# pyright: reportUnusedImport=false
"""The values that cross a stage line: frozen, keyword-only, free of torch, and writable as JSON by `to_plain`.

One run is a chain of these (docs/runs.md); a stage reads the values before it and returns one more.
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
    Axis,
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
