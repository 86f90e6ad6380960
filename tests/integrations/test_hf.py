"""Hugging Face's Trainer and accelerate around a BaocOptimizer: what they keep, and resuming bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from baoc import BaocOptimizer
from baoc.errors import BadInputError
from baoc.integrations.hf import BudgetCallback, budgeted, make_optimizer, with_budget
from baoc.planning.planner import PlannerSettings
from baoc.training.session import SessionSettings
from tests.support.classifier import same

pytestmark = [
    pytest.mark.slow,  # transformers' and accelerate's imports
    pytest.mark.filterwarnings("ignore:.*pin_memory.*", "ignore:.*LeafSpec.*", "ignore::DeprecationWarning"),
]

PRIOR = SessionSettings(planner=PlannerSettings(risk="prior"))  # AdamW itself where nothing binds


def classifier() -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForSequenceClassification(
        BertConfig(vocab_size=64, intermediate_size=64, max_position_embeddings=32, **sizes)
    )


def sentences() -> list[dict[str, Any]]:
    ids = torch.randint(0, 64, (64, 12), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": int(row.sum() % 2)} for row in ids]


def arguments(folder: Path, **changed: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "max_steps": 6, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "save_steps": 3,
        "weight_decay": 0.1, "learning_rate": 1e-3, "warmup_steps": 2, "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "logging_steps": 2,
    }  # fmt: skip
    return TrainingArguments(str(folder), **{**given, **changed})


def trained(
    folder: Path, *, budget: str | None, resume: bool = False, settings: SessionSettings | None = None, **changed: Any
) -> Trainer:
    trainer = Trainer(classifier(), arguments(folder, **changed), train_dataset=sentences())
    if budget is not None:
        with_budget(trainer, budget=budget, settings=settings)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
    return trainer


def test_a_trainer_trains_as_with_its_own_adamw_where_no_budget_binds(tmp_path):
    plain, ours = (
        trained(tmp_path / "plain", budget=None),
        trained(tmp_path / "ours", budget="unlimited", settings=PRIOR),
    )
    pairs = zip(plain.model.parameters(), ours.model.parameters(), strict=True)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)


def test_a_second_train_goes_on_as_with_the_trainers_own_adamw(tmp_path, capsys):
    ends = []
    for budget in (None, "unlimited"):
        trainer = trained(tmp_path / str(budget), budget=budget, settings=PRIOR)
        optimizer = trainer.optimizer
        capsys.readouterr()
        trainer.train()
        assert trainer.optimizer is optimizer
        assert capsys.readouterr().out.count("BaocOptimizer: 12 steps, ") == (budget is not None)
        assert sum("memory/state_gib" in entry for entry in trainer.state.log_history[-2:]) == (budget is not None)
        ends.append([param.detach() for param in trainer.model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*ends, strict=True))


def test_a_second_budget_is_refused(tmp_path):
    trainer = with_budget(Trainer(classifier(), arguments(tmp_path), train_dataset=sentences()), budget="state_25")
    with pytest.raises(BadInputError, match="has a budget already: call with_budget once"):
        with_budget(trainer, budget="state_10")
    trainer.train()
    with pytest.raises(BadInputError, match="has a budget already: call with_budget once"):
        with_budget(trainer, budget="state_10")


@pytest.mark.parametrize("budget", ["state_25", "8gb"])
def test_groups_schedule_logs_and_verdict_are_there_and_it_resumes_bit_for_bit(budget: str, tmp_path, capsys):
    trainer = trained(tmp_path, budget=budget)
    told = capsys.readouterr().out
    assert f"plan for budget {budget}" in told and "BaocOptimizer: 6 steps" in told and "met, " in told
    optimizer = budgeted(trainer.optimizer)
    assert optimizer is not None and optimizer.budget_met
    decayed, others = optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert "bert.embeddings.word_embeddings.weight" in decayed["param_names"]
    assert all(name.endswith("bias") or "LayerNorm" in name for name in others["param_names"])
    assert decayed["lr"] == 0.0  # the schedule's last rate
    assert any("memory/state_fraction" in entry for entry in trainer.state.log_history)
    assert same(trainer.model, trained(tmp_path, budget=budget, resume=True).model)
    assert "resumed after step 3" in capsys.readouterr().out


def test_an_optimizer_of_ones_own_has_the_trainers_groups(tmp_path):
    model, given = classifier(), arguments(tmp_path / "made")
    optimizer = make_optimizer(model, given, budget="state_25", verbose=False)
    trainer = Trainer(model, given, train_dataset=sentences(), optimizers=(optimizer, None))
    trainer.add_callback(BudgetCallback(trainer))
    trainer.train()
    assert same(model, trained(tmp_path / "wrapped", budget="state_25").model)
    with pytest.raises(BadInputError, match="the Trainer has an optimizer already"):
        with_budget(trainer, budget="state_25")


def test_another_optimizer_of_the_trainer_is_refused_by_name(tmp_path):
    with pytest.raises(
        BadInputError, match=r'optim="adamw_torch"\) is AdamW\) returned Adafactor: BAOC takes over torch.optim.AdamW'
    ):
        trained(tmp_path, budget="state_25", optim="adafactor")


def accelerated(folder: Path, *, steps: int, budget: str = "state_25", begin: int = 0) -> nn.Module:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
    optimizer: Any = BaocOptimizer(model, budget=budget, lr=1e-2, verbose=False)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    x = torch.randn(96, 16, generator=torch.Generator().manual_seed(3))
    loader: Any = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=8)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    if begin:
        accelerator.load_state(str(folder))
        loader = accelerator.skip_first_batches(loader, 2 * begin)
    for number, (inputs, labels) in enumerate(loader, start=2 * begin):
        if number == 2 * steps:
            break
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    accelerator.save_state(str(folder))
    assert optimizer.optimizer.num_steps == steps
    return accelerator.unwrap_model(model)


@pytest.mark.parametrize("budget", ["state_25", "8gb"])
def test_accelerate_prepares_saves_and_loads_bit_for_bit(budget: str, tmp_path):
    whole = accelerated(tmp_path / "whole", steps=5, budget=budget)
    accelerated(tmp_path / "part", steps=3, budget=budget)
    assert same(whole, accelerated(tmp_path / "part", steps=5, budget=budget, begin=3))


def test_auto_batch_sets_what_fits_and_keeps_the_samples_of_a_step(tmp_path, capsys):
    trainer = Trainer(classifier(), arguments(tmp_path, max_steps=2), train_dataset=sentences())
    with_budget(trainer, budget="8gb", auto_batch=True)
    told = capsys.readouterr().out
    given = trainer.args
    assert given.per_device_train_batch_size * given.gradient_accumulation_steps == 8
    size = f"{given.gradient_accumulation_steps} x {given.per_device_train_batch_size} samples a step"
    assert f"auto_batch: {size}" in " ".join(told.split())
    trainer.train()
    assert trainer.state.global_step == 2
    assert trainer.get_train_dataloader().total_batch_size == given.per_device_train_batch_size


def test_auto_batch_does_not_plan_fp16_as_fp32(tmp_path):
    trainer = Trainer(classifier(), arguments(tmp_path), train_dataset=sentences())
    trainer.args.fp16 = True  # TrainingArguments refuses it on a CPU
    with pytest.raises(BadInputError, match="fp32 or bf16, and the arguments have fp16=True: set bf16=True, or leave"):
        with_budget(trainer, budget="8gb", auto_batch=True)


def test_auto_batch_needs_numbered_samples(tmp_path):
    stream = torch.utils.data.ChainDataset([])
    trainer = Trainer(classifier(), arguments(tmp_path), train_dataset=stream)
    with pytest.raises(
        BadInputError, match="auto_batch takes the first samples of train_dataset, and there are none by"
    ):
        with_budget(trainer, budget="8gb", auto_batch=True)
