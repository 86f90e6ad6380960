"""Which settings a resumed run names as others than its checkpoint's, and that every setting has been asked about."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baoc.config.from_hydra import to_conf
from baoc.config.schema import RunConfig
from baoc.config.trainer_arguments import TrainerConfig
from baoc.core.compared import COMPARED
from baoc.training import resume
from baoc.training.resume import tell_changes, training_settings

GIVEN = TrainerConfig(gradient_clip_val=1.0)


def run_config(*, batch_size: int = 64, micro_batch: int | None = None, **trainer: Any) -> RunConfig:
    return RunConfig(batch_size=batch_size, micro_batch=micro_batch, trainer=replace(GIVEN, **trainer))


def test_every_setting_has_a_row() -> None:
    assert set(COMPARED) == {*to_conf(RunConfig()), "accumulation"}


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ({"devices": 2, "micro_batch": 32}, {"micro_batch": 64}, ""),
        ({"devices": 2, "micro_batch": 16}, {"micro_batch": 32}, ""),
        ({"devices": 2, "micro_batch": 32}, {"micro_batch": 32}, "accumulation 1 -> 2"),
        ({"devices": 2}, {"batch_size": 128}, "batch_size 64 -> 128"),
        ({}, {"precision": "32-true"}, ""),
        ({"precision": 32}, {}, ""),
        ({"precision": "bf16"}, {"precision": "bf16-mixed"}, ""),
        ({"precision": "16"}, {"precision": 16}, ""),
        ({}, {"precision": "64-true"}, "trainer.precision 32-true -> 64-true"),
        ({}, {"gradient_clip_algorithm": "norm"}, ""),
        ({}, {"gradient_clip_algorithm": "value"}, "trainer.gradient_clip_algorithm norm -> value"),
        ({"gradient_clip_val": None}, {"gradient_clip_val": 0}, ""),
        ({}, {"gradient_clip_val": 0.0}, "trainer.gradient_clip_val 1.0 -> null"),
        ({}, {"log_every_n_steps": 3}, ""),
    ],
)
def test_a_resume_names_what_a_step_sees_otherwise(
    before: dict[str, Any],
    now: dict[str, Any],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    content = {resume.META_KEY: {"settings": training_settings(run_config(**before))}}
    monkeypatch.setattr(resume, "load_checked", lambda _: content)
    tell_changes(run_config(**now), checkpoint=Path("last.ckpt"), sources={})
    assert caplog.messages == (
        [f"the training goes on with other settings than the checkpoint's: {told}"] if told else []
    )


def test_a_checkpoint_of_an_earlier_version_tells_its_micro_batch_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = training_settings(run_config())
    del settings["accumulation"]
    monkeypatch.setattr(
        resume, "load_checked", lambda _: {resume.META_KEY: {"settings": settings | {"micro_batch": 8}}}
    )
    tell_changes(run_config(), checkpoint=Path("last.ckpt"), sources={})
    assert caplog.messages == []
