"""What later work may count on: fields, tags, modes and schema versions. A change here changes the contract."""

from dataclasses import fields
from typing import get_args, get_type_hints

from baoc.config.schema import RunConfig
from baoc.optim import checkpoint
from baoc.optim.codecs import Codec
from baoc.optim.rules.base import UpdateRule
from baoc.tracking.checkpoints import CHECKPOINT_SCHEMA
from baoc.tracking.metrics import METRICS_SCHEMA
from baoc.training import run as train
from baoc.types import Axis, Candidate, GradientStats, OptimizerSpec, RuleInfo, StateDecl, StateKind, StateLayout


def names(cls: type) -> set[str]:
    return {item.name for item in fields(cls)}


def test_fields_of_specs_rules_and_candidates():
    assert names(OptimizerSpec) == {"name", "description", "rule", "storage", "weights", "placement"}
    assert names(RuleInfo) >= {
        "name",
        "description",
        "states",
        "counts_steps",
        "matched",
        "needs_matrix",
        "hidden_only",
    }
    assert names(StateDecl) >= {"name", "kind", "layout", "level"}
    assert names(Candidate) >= {"block", "spec", "cost", "risk", "role"}
    assert names(GradientStats) >= {
        *("num_samples", "grad_rms", "coherence", "noise", "anisotropy", "snr_fan_in", "snr_fan_out"),
        *("factor_residual", "spread", "update_rms", "descent_share", "fold_residual"),
    }


def test_state_tags():
    assert [str(kind) for kind in StateKind] == ["m", "v"]
    assert [str(layout) for layout in StateLayout] == ["full", "per_row", "per_column", "folded"]
    assert [str(axis) for axis in Axis] == ["fan_in", "fan_out"]


def test_protocols_of_rules_and_codecs():
    assert {"info", "direction", "last"} <= set(dir(UpdateRule))
    assert {"info", "in_place", "allocate", "encode_", "decode"} <= set(dir(Codec))


def test_modes_of_a_run():
    hints = get_type_hints(RunConfig)
    assert get_args(hints["mode"]) == ("train", "eval", "plan", "race")
    assert get_args(hints["objective"]) == ("quality", "throughput", "balanced")
    assert {"batch_size", "micro_batch", "resume", "device", "optim"} <= names(RunConfig)


def test_versions_of_what_is_written():
    assert (train.RESULT_SCHEMA, METRICS_SCHEMA, CHECKPOINT_SCHEMA) == (1, 1, 1)
    assert checkpoint.SCHEMA == 2
