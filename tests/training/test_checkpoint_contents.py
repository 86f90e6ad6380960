"""Checkpoints that are intact as files and wrong in what they hold: refused by name before anything changes, and passed
over by `resume=auto`."""

import copy
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baoc.callbacks.checkpoint import AtomicCheckpointIO, check_contents
from baoc.errors import BadInputError, CheckpointError
from baoc.tracking.checkpoints import load_checked, resolve_resume
from baoc.training.resume import find_checkpoint, saved_decision, write_decision
from tests.support.training_runs import config, run

pytestmark = pytest.mark.slow  # they train, save and load

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("day") / "job"
    given = config()
    run(run_dir, trainer=short(3), checkpoint=given.checkpoint)
    return run_dir


def short(steps: int) -> Any:
    from dataclasses import replace

    return replace(config().trainer, max_steps=steps, val_check_interval=3)


def _first_weight(content: dict[str, Any]) -> torch.Tensor:
    return next(tensor for tensor in content["state_dict"].values() if tensor.is_floating_point())


CHANGES: dict[str, tuple[Change, str]] = {
    **{
        f"no {key}": (lambda content, key=key: content.pop(key), f"lacks '{key}', so it is damaged")
        for key in (
            *("global_step", "epoch", "state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks"),
            "hyper_parameters",
        )
    },
    "text as global_step": (lambda c: c.update(global_step="12"), "has a 'global_step' that is not a count"),
    "a negative global_step": (lambda c: c.update(global_step=-1), "has a 'global_step' that is not a count"),
    "no optimizer's states": (lambda c: c.update(optimizer_states=[]), ".* not the states of one optimizer"),
    "weights by nothing": (lambda c: c.update(state_dict={}), "has a 'state_dict' that is not tensors by name"),
    "a weight as text": (lambda c: c["state_dict"].update(extra="x"), "has a 'state_dict' that is not tensors"),
    "a weight of NaN": (lambda c: _first_weight(c).fill_(math.nan), "has weights model.* that are NaN or infinite"),
    "an infinite weight": (
        lambda c: _first_weight(c).view(-1)[-1].fill_(-math.inf),
        "has weights .* that are NaN or infinite",
    ),
    **{
        f"a buffer of NaN, {name}": (
            lambda c, change=change: c["state_dict"].update(buffer=change(torch.full((2, 2), math.nan))),
            "has weights buffer that are NaN or infinite",
        )
        for name, change in {
            "sparse": torch.Tensor.to_sparse,
            "complex": lambda it: it.to(torch.complex64),
            "of 8 bits": lambda it: it.to(torch.float8_e4m3fn),
        }.items()
    },
    **{
        f"a schedule at {at}": (
            lambda c, at=at: c["lr_schedulers"][0].update(last_epoch=at),
            "has a 'lr_schedulers' that is not the steps of schedules",
        )
        for at in ("text", -7, 10**30)
    },
    "a schedule that is none": (lambda c: c.update(lr_schedulers=["x"]), "has a 'lr_schedulers' that is not the steps"),
    "no schedule": (lambda c: c.update(lr_schedulers=[]), "has no steps of the schedule that its run had, which would"),
    "no generators": (lambda c: c["callbacks"].pop("RngState"), "lacks the state of the random generators"),
    "half of a generator": (
        lambda c: c["callbacks"]["RngState"].update(torch=torch.zeros(7, dtype=torch.uint8)),
        "has states of random generators that none takes",
    ),
    "generators of None": (lambda c: c["callbacks"].update(RngState=None), "lacks the state of the random generators"),
    "no fit_loop": (lambda c: c["loops"].pop("fit_loop"), "is of step 3, and its loops of step None: it is damaged"),
    "loops of another step": (lambda c: c.update(global_step=2), "is of step 2, and its loops of step 3"),
    "loops as a list": (lambda c: c.update(loops=[]), "has a 'loops' that is not the progress of loops"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_it_is_told_by_name_and_passed_over(
    folder: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    change, told = CHANGES[name]
    mine = tmp_path / "day" / "job"
    shutil.copytree(folder, mine)
    last, other = mine / "checkpoints" / "last.ckpt", mine / "checkpoints" / "best_00000003.ckpt"
    content = copy.deepcopy(load_checked(last))
    change(content)
    AtomicCheckpointIO().save_checkpoint(content, last)
    with pytest.raises(CheckpointError, match=rf"last\.ckpt {told}.*resume=auto"):
        find_checkpoint(config(resume=str(last)), run_dir=tmp_path / "other")
    assert find_checkpoint(config(resume="auto"), run_dir=mine) == other
    assert "passed over when looking for a checkpoint to resume" in caplog.text


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_what_is_right_is_taken(folder: Path) -> None:
    last = folder / "checkpoints" / "last.ckpt"
    content = load_checked(last)
    check_contents(content)
    half = torch.full((2, 2), 0.5)
    others = (half.to_sparse(), half.to_sparse_csr(), half.to(torch.complex64), half.to(torch.float8_e4m3fn))
    check_contents({**content, "state_dict": dict(zip("abcd", others, strict=True))})
    assert find_checkpoint(config(resume=str(last)), run_dir=folder) == last
    loops = copy.deepcopy(content["loops"])  # of a task without a schedule
    loops["fit_loop"]["epoch_loop.scheduler_progress"]["total"]["completed"] = 0
    check_contents({**content, "lr_schedulers": [], "loops": loops})


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["loops"]["fit_loop"]["epoch_progress"].clear(),
        lambda c: c["optimizer_states"][0].update(state=5),
        lambda c: c["optimizer_states"][0].update(online={"step": 1}),
        lambda c: c["callbacks"].update({key: 3 for key in c["callbacks"] if "SafeCheckpoint" in key}),
        lambda c: c.update(lr_schedulers=[None]),
    ],
)
def test_what_only_restoring_finds_is_told_too(folder: Path, tmp_path: Path, change: Change) -> None:
    """Parts that belong to Lightning or a callback: an error of theirs is the checkpoint's, no bug."""
    content = copy.deepcopy(load_checked(folder / "checkpoints" / "last.ckpt"))
    change(content)
    path = tmp_path / "wrong.ckpt"
    AtomicCheckpointIO().save_checkpoint(content, path)
    with pytest.raises(CheckpointError, match="checkpoint"):
        run(tmp_path / "job", trainer=short(4), resume=str(path))
    assert not (tmp_path / "job" / "metrics.jsonl").exists()


def test_any_bit_of_an_archive_is_told(tmp_path: Path) -> None:
    """The records at its end too, which readers follow before any checksum is looked at."""
    intact, last = tmp_path / "checkpoints" / "step_00000002.ckpt", tmp_path / "checkpoints" / "last.ckpt"
    for path in (intact, last):
        AtomicCheckpointIO().save_checkpoint({"baoc_schema": 1, "baoc": {"written_s": 1.0}, "w": torch.ones(2)}, path)
    whole = last.read_bytes()
    for place in range(len(whole) - 600, len(whole)):
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        last.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"last\.ckpt"):
            load_checked(last)
        if place % 20 == 0:
            assert resolve_resume("auto", run_root=tmp_path) == intact


@pytest.mark.parametrize(
    "made",
    [
        [],
        {},
        3,
        {"micro_batch": "8", "checkpointing": True},
        {"micro_batch": 8, "checkpointing": 0},
        {"micro_batch": 8, "checkpointing": "all"},
        {"micro_batch": 8, "checkpointing": 2, "num_layers": "4"},
    ],
)
def test_a_decision_that_is_none_is_told(tmp_path: Path, made: Any) -> None:
    write_decision(made, run_dir=tmp_path)
    with pytest.raises(BadInputError, match=r"decision\.json is no decision of a run .*remove it to have it decided"):
        saved_decision(config(), checkpoint=tmp_path / "checkpoints" / "last.ckpt")
