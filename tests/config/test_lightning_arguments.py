"""conf/trainer against the installed Lightning's Trainer: every argument is passed through or decided, none is lost."""

import inspect
from dataclasses import fields

import lightning as L
import pytest

from baoc.config.schema import RunConfig
from baoc.config.trainer_arguments import SET_BY_BAOC, TrainerConfig

ARGUMENTS = {
    name: parameter.default
    for name, parameter in inspect.signature(L.Trainer.__init__).parameters.items()
    if name != "self"
}


FULLY_SHARD = "reshard_after_forward"  # is one of torch's fully_shard


def test_every_argument_is_passed_through_or_decided():
    ours = {item.name for item in fields(TrainerConfig)} - {FULLY_SHARD}
    assert ours | set(SET_BY_BAOC) == set(ARGUMENTS)
    assert not ours & set(SET_BY_BAOC)


@pytest.mark.parametrize(
    "name", [item.name for item in fields(TrainerConfig) if item.name not in ("devices", FULLY_SHARD)]
)
def test_a_default_is_that_of_lightning(name: str):
    assert getattr(TrainerConfig(), name) == ARGUMENTS[name]


def test_a_trainer_takes_the_arguments_of_a_default_run(tmp_path):
    arguments = RunConfig().trainer.arguments()
    trainer = L.Trainer(**arguments, logger=False, accelerator="cpu", default_root_dir=tmp_path)
    assert (trainer.max_steps, trainer.gradient_clip_val) == (400, 1.0)
