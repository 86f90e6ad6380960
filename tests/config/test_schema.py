"""Checks that a RunConfig makes of its own values, and its way to config.yaml and back."""

import errno
import os
from pathlib import Path

import pytest

from baoc.config.environment import write_environment
from baoc.config.from_hydra import from_plain, to_conf, write_config
from baoc.config.schema import RunConfig
from baoc.core.budgets import parse_budget
from baoc.errors import BadInputError, OutputError
from tests.support.paths import read_config


def test_accumulation_is_the_quotient_of_the_batches():
    assert (RunConfig(batch_size=64).micro_batch_size, RunConfig(batch_size=64).accumulation) == (64, 1)
    split = RunConfig(batch_size=64, micro_batch=16)
    assert (split.micro_batch_size, split.accumulation) == (16, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size": 64, "micro_batch": 24}, r"micro_batch=24 does not divide batch_size=64.*choose a micro_batch"),
        ({"batch_size": 0}, r"batch_size=0 is not allowed: it must be 1 or more samples"),
        ({"micro_batch": "most"}, r"micro_batch=most is not allowed: it must be a whole number or auto or null"),
        ({"mode": "eval"}, r"mode=eval evaluates a checkpoint: name it with resume=PATH, or resume=auto"),
        ({"mode": "test"}, r"mode=test is not allowed: choose mode=train\|eval\|plan"),
        ({"device": "gpu"}, r"device=gpu is not allowed: choose device=auto\|cpu\|cuda"),
        ({"name": "a/b"}, r"name=a/b is not allowed: it must be letters, digits"),
        ({"optim": {"lr": 0}}, r"optim.lr=0 is not allowed: it must be above 0, or null"),
        ({"optim": {"betas": [0.9, 1.0]}}, r"optim.betas=\[0.9, 1.0\] is not allowed: it must be two numbers in"),
        ({"optim": {"schedule": "cosin"}}, r"optim.schedule=cosin is not allowed.*did you mean cosine\?"),
        ({"task": {"label_smoothing": "much"}}, r"task.label_smoothing=much is not allowed: it must be a number"),
        ({"task": {"label_smothing": 0.1}}, r"unknown key task.label_smothing; did you mean task.label_smoothing\?"),
        ({"model": {"lora": {"rank": 0}}}, r"model.lora.rank=0 is not allowed: it must be 1 or more, or null"),
        ({"model": {"lora": {"alpha": 2}}}, r"model.lora.alpha and model.lora.targets need a model.lora.rank"),
        ({"model": {"new_head": True}}, r"model.new_head=true is about pretrained weights: give model.pretrained"),
        ({"model": {"checkpointing": -1}}, r"model.checkpointing=-1 is not allowed: it must be 0 or more layers, true"),
        (
            {"model": {"checkpointing": 1.5}},
            r"model.checkpointing=1.5 is not allowed: it must be true or false",
        ),
        ({"model": {"dropot": 0.1}}, r"unknown key model.dropot; did you mean model.dropout\?"),
        ({"model": {"name": "vitt"}}, r"there is no model 'vitt' \(did you mean vit\?\)"),
        ({"model": "vit"}, r"model must be a group of keys, not vit: choose it with model=NAME"),
        (
            {"dataset": {"name": "images", "image_size": "x"}},
            r"dataset.image_size=x is not allowed: it must be a whole number",
        ),
        (
            {"blocks": {"merge": 1.0}},
            r"blocks.merge was removed: .*: choose coarser blocks",
        ),
        ({"reallocation": {"update_rms": "profiled"}}, r"reallocation.update_rms was removed: .*: leave it out"),
        ({"profile": "runs/1"}, r"profile was removed: .*: leave it out"),
        ({"faults": {"nonfinite_loss": "stop"}}, r"faults.nonfinite_loss was removed: .*: set faults.patience=1"),
        ({"reallocation": {"mode": "drift"}}, r"^reallocation=drift was removed: no decision .* choose reallocation=o"),
        ({"mode": "drift"}, r"^mode=drift is not allowed"),
        ({"budget": {"relaxation": {"from_step": 9}}}, r"budget.relaxation was removed: .*: name steps and budgets in"),
        ({"blocks": {"patterns": [["a"]]}}, r"blocks.patterns\[0\]=\['a'\] is not allowed: it must be a list of 2"),
        ({"catalogue": {"specs": []}}, r"catalogue.specs=\[\] is not allowed: it must be at least one name"),
        ({"risk": {"weights": {"drop_m": -1}}}, r"risk.weights.drop_m=-1 is not allowed: it must be zero or more"),
        ({"reallocation": {"warmup_steps": 1}}, r"reallocation.warmup_steps=1 is not allowed: it must be 2 or more"),
        ({"trainer": {"max_steps": 0}}, r"trainer.max_steps=0 is not allowed: it must be 1 or more, or -1"),
        ({"trainer": {"max_stps": 1}}, r"unknown key trainer.max_stps; did you mean trainer.max_steps"),
        ({"trainer": {"devices": 0}}, r"trainer.devices=0 is not allowed: it must be 1 or more"),
        (
            {"trainer": {"devices": 3}},
            r"batch_size=64 is of all devices together, and trainer.devices=3 does not divide it",
        ),
        (
            {"trainer": {"devices": 2}, "micro_batch": 64},
            r"micro_batch=64 on each of trainer.devices=2 does not divide",
        ),
        ({"trainer": {"accumulate_grad_batches": 4}}, r"is decided by BAOC: set micro_batch"),
        ({"logger": {"names": ["tensorboard"]}}, r"logger.names\[0\]=tensorboard is not allowed.*jsonl\|csv\|wandb"),
        ({"budget": {"memory": "8gbb"}}, r"cannot read '8gbb' as a memory size"),
        ({"budget": None}, r"a run needs a budget: budget=unlimited"),
        ({"foo": 1}, r"unknown key foo\na run has: name, seed"),
    ],
)
def test_each_bad_value_is_refused_by_name(given, message: str):
    with pytest.raises(BadInputError, match=r"(?s)" + message):
        from_plain(given)


def test_config_yaml_reads_back_as_the_same_run(tmp_path: Path):
    run = from_plain(
        {
            "name": "x",
            "micro_batch": 16,
            "model": {"dropout": 0.25, "freeze": ["*embeddings*"], "lora": {"rank": 8}},
            "task": {"mixup": 0.2},
            "dataset": {"name": "images", "path": "here", "workers": 2, "augment": "flip"},
            "budget": "7.5gb",
            "blocks": {"patterns": [["qk", "*.query.*"]]},
            "reallocation": {"mode": "off"},
            "trainer": {"precision": "bf16-mixed", "deterministic": "warn"},
        }
    )
    write_config(run, path=tmp_path / "config.yaml")
    assert read_config(tmp_path / "config.yaml") == run
    assert run.budget == parse_budget("7.5gb") and to_conf(run)["budget"]["memory"] == "7.5gb"
    assert run.model.options == {"dropout": 0.25} and to_conf(run)["model"]["dropout"] == 0.25
    assert (run.model.freeze, run.model.lora.rank, run.task.options["mixup"]) == (("*embeddings*",), 8, 0.2)
    assert (run.dataset.options["workers"], run.dataset.options["augment"], run.dataset.path) == (2, "flip", "here")


def test_a_full_disk_is_told_with_the_file_of_a_run_that_it_keeps_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"no space left for config.yaml in "):
        write_config(RunConfig(), path=tmp_path / "config.yaml")
    with pytest.raises(OutputError, match=r"no space left for env.json in "):
        write_environment(tmp_path / "env.json", baoc="1", command="c", argv=(), device="cpu")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("relaxation", [{}, {"from_step": None, "every": 100, "calm": 0.5, "max_risk": 0.1}])
def test_a_config_of_an_older_run_may_hold_removed_keys_that_did_nothing(relaxation: dict[str, object]):
    gone = {"update_rms": "usual", "interval": 50, "drift_threshold": 0.1, "min_gain": 0.0}
    older = {
        "profile": None,
        "faults": {"nonfinite_loss": "skip", "patience": 20, "max_rewinds": 3},
        "blocks": {"by": "layer", "merge": None},
        "reallocation": {"mode": "once", **gone},
        "budget": {"memory": "8gb", "relaxation": relaxation},
    }
    run = from_plain(older)
    assert (run.blocks.by, run.reallocation.mode) == ("layer", "once")


@pytest.mark.parametrize(
    "spelling", ["auto", "unlimited", "state_12.5", "123456789b", {"memory": 1234567, "name": "odd"}]
)
def test_every_kind_of_budget_survives_config_yaml(spelling, tmp_path: Path):
    run = RunConfig(budget=parse_budget(spelling))
    write_config(run, path=tmp_path / "config.yaml")
    assert read_config(tmp_path / "config.yaml").budget == run.budget


def test_the_schema_needs_neither_torch_nor_hydra(run_python):
    code = "import sys, baoc.config.schema; print(sorted({'torch', 'hydra', 'omegaconf'} & set(sys.modules)))"
    assert run_python(code).stdout.strip() == "[]"
