"""The study of roles: replicas that train together end as each would alone, and lists are what they say."""

import lzma
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from baoc.core.catalogue import SPECS
from baoc.core.recipes import recipe_keys
from baoc.core.rule_tags import RULE_INFOS
from baoc.optim import BlockwiseOptimizer
from baoc.planning.cost import state_bytes
from experiments.benchmarks.recipe_lists import MATCHING, WEIGHT_DECAY
from experiments.benchmarks.role_runs import Bench, Replicas, Run, schedule
from experiments.benchmarks.role_study import mixtures, permutation, random_plan, role_runs, whole_recipes
from experiments.benchmarks.role_tasks import TASKS

STEPS = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, drawn = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    text = bytes(drawn.integers(32, 127, 20_000, dtype=np.uint8))
    (folder / "package_text.xz").write_bytes(lzma.compress((4000).to_bytes(8, "big") + text))
    arrays = {}
    for split, count in (("train", 5100), ("test", 64)):
        arrays[f"{split}_images"] = drawn.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"{split}_labels"] = drawn.integers(0, 10, count, dtype=np.uint8)
    np.savez(folder / "fashion_mnist.npz", **arrays)
    return folder


@pytest.fixture(params=list(TASKS))
def bench(request: pytest.FixtureRequest, data: Path) -> Bench:
    return Bench(TASKS[request.param](torch.device("cpu"), data=data, size="test"))


def alone(bench: Bench, run: Run, *, lr: float) -> float:
    """A plain loop over one network, its value at the end."""
    model = bench.task.build()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(bench.weights(run.seed)[name])
    optimizer = BlockwiseOptimizer(
        model, bench.specs(run), blocks=bench.blocks, lr=lr, weight_decay=WEIGHT_DECAY, rms_matching=MATCHING,
        tuning=run.recipe.tuning,
    )  # fmt: skip
    plan = bench.task.plan(torch.Generator().manual_seed(1000 + run.seed), STEPS)
    for number in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = lr * run.factor * schedule(number, STEPS)
        optimizer.zero_grad()
        seen = bench.task.seen({name: held[number] for name, held in plan.items()})
        bench.task.loss(model, dict(model.named_parameters()), seen).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        judged = [bench.task.judge(model, dict(model.named_parameters()), held) for held in bench.task.held("report")]
    return float(torch.stack(judged).mean(0)[0])


@pytest.mark.slow
def test_replicas_end_as_each_would_alone(bench: Bench) -> None:
    recipes, lr = whole_recipes(), 3e-3
    runs = [
        Run(phase="x", label=name, recipe=recipes[name], factor=factor, seed=seed)
        for name, factor, seed in (("muon8_lean", 1.0, 1), ("adamw", 4.0, 1), ("foam8_lean", 2.0, 3))
    ]
    results = Replicas(bench, runs, steps=STEPS, lr=lr).train()
    for run, result in zip(runs, results, strict=True):
        assert result.value == pytest.approx(alone(bench, run, lr=lr), rel=1e-4)
    assert results[1].state_fraction == 1.0


def test_a_role_learns_at_its_own_multiple(bench: Bench) -> None:
    still = Run(phase="x", label="head", recipe=whole_recipes()["muon8_lean"], factor=1.0, seed=1)
    replicas = Replicas(bench, [replace(still, multiples={"head": 1e-9})], steps=STEPS, lr=3e-3)
    before = {name: held.detach().clone() for name, held in replicas.stacks.items()}
    replicas.train()
    heads = {info.name for block in bench.blocks if block.role.value == "head" for info in block.params}
    moved = {name: float((held - before[name]).abs().max().detach()) for name, held in replicas.stacks.items()}
    assert max(moved[name] for name in heads) < 1e-6 < 1e-3 < max(moved.values())


def test_lists_replace_one_role_and_plans_keep_to_their_budget(bench: Bench) -> None:
    best = dict.fromkeys(whole_recipes(), 1.0)
    runs = role_runs(bench, best=best, seed=1)
    base = bench.specs(runs[0])
    assert len({run.label for run in runs}) == len(runs)
    for run in runs:
        if run.role:
            changed = {name for name, spec in bench.specs(run).items() if spec != base[name]}
            assert changed <= {block.name for block in bench.blocks if run.role in recipe_keys(block)}
            assert changed or run.role_factor != 1
    assert mixtures(bench.roles) == mixtures(bench.roles)
    plan, by_name = random_plan(bench, limit=0.25, drawn=random.Random(1)), {b.name: b for b in bench.blocks}
    size = sum(state_bytes(by_name[n], spec=SPECS[s], rule=RULE_INFOS[SPECS[s].rule]) for n, s in plan.items())
    assert size <= 0.25 * bench.planner.state_bytes_adamw
    assert sorted(permutation(bench, plan, random.Random(2)).values()) == sorted(plan.values())
