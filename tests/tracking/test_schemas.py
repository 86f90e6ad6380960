"""The versions of what is written: a change of one is a change of a contract with readers."""

from baoc.optim import checkpoint
from baoc.tracking.checkpoints import CHECKPOINT_SCHEMA
from baoc.tracking.metrics import METRICS_SCHEMA
from baoc.types import RESULT_SCHEMA


def test_versions_of_what_is_written() -> None:
    assert (RESULT_SCHEMA, METRICS_SCHEMA, CHECKPOINT_SCHEMA, checkpoint.SCHEMA) == (1, 1, 1, 2)
