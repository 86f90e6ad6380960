"""What BaocStrategy and BaocOptimizer say: the plan, moves, peak against prediction, and whether the budget held."""

import csv
import gc
import re
from dataclasses import replace

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from baoc import BaocOptimizer, BaocStrategy
from baoc.config.schema import ReallocationConfig
from baoc.planning.planner import PlannerSettings
from baoc.training.session import SessionSettings, warn_of_large_ties
from baoc.types import Basis, ParamInfo, Role
from tests.support.classifier import fit
from tests.support.plain_loops import net, train
from tests.support.values import make_plan

MOVING = SessionSettings(
    planner=PlannerSettings(risk="statistics"), reallocation=ReallocationConfig(mode="once", warmup_steps=3)
)


def test_an_optimizer_says_plan_moves_and_verdict_once(capsys):
    model, loss = net()
    optimizer = BaocOptimizer(model, budget="state_25", settings=MOVING)
    begun = capsys.readouterr().out
    assert begun.count("plan for budget state_25") == 1 and "budget state_25 binds" in begun
    train(optimizer, loss, steps=4)
    assert "step 3, reallocation (once)" in capsys.readouterr().out
    assert optimizer.budget_met is True
    summary = optimizer.summary()
    assert "after 4 steps" in summary and "to spare (binds)" in summary and "norm" in summary
    del optimizer
    gc.collect()
    ended = capsys.readouterr().out
    assert re.search(r"BaocOptimizer: 4 steps, (no|1) reallocation; .* budget state_25: .* met, ", ended)


def test_without_a_probe_the_plan_is_told_after_the_first_step_with_its_peak(capsys):
    model, loss = net()
    optimizer = BaocOptimizer(model, budget="8gb")
    assert "is planned for after the first step" in capsys.readouterr().out
    assert optimizer.budget_met is None
    train(optimizer, loss, steps=1)
    told = capsys.readouterr().out
    assert "plan for budget 8gb" in told and "budget 8gb does not bind" in told and "reallocation" not in told
    assert optimizer.budget_met is True
    assert re.search(r"peak [\d.]+ KiB in its first step, [\d.]+ KiB predicted", optimizer.summary())


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["unlimited", "8gb", "state_25"])
def test_quiet_is_quiet(budget: str, capsys):
    model, loss = net()
    optimizer = BaocOptimizer(model, budget=budget, verbose=False)
    train(optimizer, loss, steps=2)
    del optimizer
    gc.collect()
    fit(BaocStrategy(budget, verbose=False), steps=2)
    assert "plan" not in (out := capsys.readouterr().out) and "budget" not in out


@pytest.mark.parametrize(("budget", "verdict"), [("8gb", r"peak .* predicted; .* met, "), ("state_25", "met, ")])
def test_a_strategy_speaks_on_the_terminal_and_through_the_loggers(budget: str, verdict: str, tmp_path, capsys):
    logger = CSVLogger(tmp_path)
    strategy = BaocStrategy(budget)
    assert strategy.plan is None and strategy.budget_met is None and "before a fit" in strategy.summary()
    fit(strategy, steps=4, logger=logger, log_every_n_steps=1)
    told = capsys.readouterr().out
    assert told.count(f"plan for budget {budget}") == 1
    assert re.search(rf"BaocStrategy: 4 steps, no reallocation; .*{verdict}", told)
    assert strategy.budget_met is True and "after 4 steps" in strategy.summary()
    with open(logger.experiment.metrics_file_path, encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["memory/state_gib"]]
    assert [int(row["step"]) for row in rows] == [0, 4]
    assert float(rows[-1]["budget/met"]) == 1 and bool(rows[-1].get("memory/peak_gib")) == (budget == "8gb")


def test_the_repr_of_a_plan_is_a_line():
    model, _ = net()
    text = repr(BaocOptimizer(model, budget="state_25", verbose=False).plan)
    assert len(text) < 400 and "state_25" in text and "blocks" in text


@pytest.mark.parametrize(("name", "budget"), [("baoc", "auto"), ("baoc_state_25", "state_25")])
def test_a_trainer_knows_the_strategy_by_name(name: str, budget: str):
    trainer = L.Trainer(strategy=name, accelerator="cpu", devices=1, logger=False)
    assert isinstance(trainer.strategy, BaocStrategy) and trainer.strategy.budget.name == budget


@pytest.mark.parametrize(("std", "warned"), [(1.0, True), (0.02, False)])
def test_a_tied_embedding_that_begins_large_is_warned_of_under_measured_rates(std, warned, caplog):
    infos = [
        ParamInfo(name="wte.weight", shape=(50, 64), dtype="float32", role=Role.EMBEDDING, aliases=("lm_head.weight",)),
        ParamInfo(name="h.weight", shape=(64, 64), dtype="float32", role=Role.MLP),
    ]
    params = {"wte.weight": std * torch.randn(50, 64), "h.weight": torch.randn(64, 64)}
    plan = make_plan()
    for multiples, tells in (({"muon": 4.0}, warned), ({}, False)):
        caplog.clear()
        basis = Basis(by="measured", text="x", lr=multiples)
        warn_of_large_ties(infos, params=params, plan=replace(plan, basis=basis))
        assert ("wte.weight is tied (lm_head.weight) and begins with weights of RMS" in caplog.text) is tells
