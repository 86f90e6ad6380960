"""What a resumed run goes on with: the decision of the run before unless it is told otherwise, and its seconds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baoc.config.schema import ModelConfig, OptimConfig, RunConfig
from baoc.errors import BadInputError, CheckpointError
from baoc.tracking.files import append_jsonl, read_jsonl
from baoc.training.plan_files import Recorder
from baoc.training.resume import conflicts, decision_of, saved_decision, saved_latency, with_decision, write_decision
from baoc.types import Budget, LatencyTable, to_plain
from tests.support.planners import option
from tests.support.values import make_plan

CHOICE = {"micro_batch": 16, "checkpointing": True, "release": False}
TABLE = LatencyTable(
    device="cpu",
    fixed_s={"adamw": 1e-6},
    per_element_s={"adamw": 1e-9},
    base_step_s=0.1,
    reference_step_s=0.2,
    assumed=("adamw",),
)


def folder(tmp_path: Path) -> Path:
    """A run folder's checkpoint; only its place counts."""
    write_decision(CHOICE, run_dir=tmp_path)
    return tmp_path / "checkpoints" / "step_4"


def test_a_resumed_run_goes_on_with_what_was_decided(tmp_path: Path):
    config = RunConfig(batch_size=64, micro_batch="auto")
    assert saved_decision(config, checkpoint=None) == {}
    assert saved_decision(config, checkpoint=tmp_path / "checkpoints" / "step_4") == {}
    choice = saved_decision(config, checkpoint=folder(tmp_path))
    assert choice == CHOICE
    made = with_decision(config, decision=choice)
    assert (made.micro_batch, made.model.checkpointing, made.optim.release_gradients) == (16, True, False)
    earlier = {"micro_batch": 16, "checkpointing": True}  # of a version without release
    assert with_decision(config, decision=earlier) == made and conflicts(earlier, config=config) == []
    choices = [decision_of(option(8, rate=1, risk=0.0, recomputed=number)) for number in (0, 3, 4)]
    assert choices == [
        {"micro_batch": 8, "checkpointing": number, "num_layers": 4, "release": False, "compile": False}
        for number in (False, 3, True)
    ]


@pytest.mark.parametrize(
    ("decided", "asked", "held"),
    [
        (True, True, True),
        (True, 4, True),
        (True, "auto", True),
        (True, None, True),
        (True, 1, False),
        (3, 3, True),
        (3, True, False),
        (1, True, False),
        (3, 0, False),
        (3, "auto", True),
        (False, 0, True),
        (False, False, True),
        (False, 4, False),
    ],
)
def test_a_number_of_recomputed_layers_is_kept_unless_another_is_asked_for(decided: Any, asked: Any, held: bool):
    choice = {"micro_batch": 16, "checkpointing": decided, "num_layers": 4, "release": False}
    config = RunConfig(batch_size=16, model=ModelConfig(checkpointing=asked))
    assert (conflicts(choice, config=config) == []) is held
    made = with_decision(config, decision=choice).model.checkpointing
    assert made is decided or made == decided == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"micro_batch": 8}, "micro_batch=16, and micro_batch=8 is asked for now"),
        ({"model": ModelConfig(checkpointing=False)}, "checkpointing=True, and checkpointing=False is asked for now"),
        ({"optim": OptimConfig(release_gradients=True)}, "release=False, and release=True is asked for now"),
        ({"batch_size": 40}, "micro_batch=16, which does not divide batch_size=40"),
    ],
)
def test_what_is_asked_for_now_wins_and_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], said: str
):
    config = RunConfig(**({"batch_size": 64, "micro_batch": None} | changes))
    assert saved_decision(config, checkpoint=folder(tmp_path)) == {}
    assert f"the resumed run had decided {said}: it is decided anew" in " ".join(capsys.readouterr().out.split())


def test_released_gradients_are_of_a_whole_batch():
    choice = {"micro_batch": 16, "checkpointing": False, "release": True}
    assert conflicts(choice, config=RunConfig(batch_size=16)) == []
    (clause,) = conflicts(choice, config=RunConfig(batch_size=32))
    assert clause == "released gradients of 16 samples at once, and batch_size=32 is asked for now"


def test_a_limit_on_time_rests_on_the_seconds_of_the_run_before(tmp_path: Path):
    limited = RunConfig(budget=Budget(name="8gb", memory_bytes=2**33, step_time=1.1))
    checkpoint = folder(tmp_path)
    assert saved_latency(limited, checkpoint=checkpoint) is None, "that run had no limit, or wrote none"
    (tmp_path / "latency.json").write_text(json.dumps(to_plain(TABLE)))
    assert saved_latency(limited, checkpoint=checkpoint) == TABLE
    assert saved_latency(replace(limited, budget=Budget(name="8gb", memory_bytes=2**33)), checkpoint=checkpoint) is None
    assert saved_latency(limited, checkpoint=None) is None
    for broken in ("{", "[]", '{"device": "cpu"}'):
        (tmp_path / "latency.json").write_text(broken)
        with pytest.raises(CheckpointError, match=r"on which budget.step_time=1.1 rests, cannot be read .*remove it"):
            saved_latency(limited, checkpoint=checkpoint)


def test_a_damaged_decision_is_said(tmp_path: Path) -> None:
    checkpoint = folder(tmp_path)
    (tmp_path / "decision.json").write_text('{"micro')
    with pytest.raises(
        BadInputError, match=r"decision.json is not JSON .*: it was damaged or is no file of ours; remove"
    ):
        saved_decision(RunConfig(), checkpoint=checkpoint)


def test_decisions_after_the_checkpoint_are_set_aside(tmp_path: Path) -> None:
    """A budget's change and a conversion at its step come after it; whoever goes on makes them again."""
    path = tmp_path / "reallocations.jsonl"
    for step, trigger in ((5, "resume"), (6, "once"), (6, "budget"), (6, "resume"), (7, "once")):
        append_jsonl(path, {"step": step, "trigger": trigger})
    Recorder(tmp_path).resumed(6, make_plan())
    assert [(event["step"], event["trigger"]) for event in read_jsonl(path)] == [(5, "resume"), (6, "once")]
