"""The measured choice through every door: what runs, at which rate, by names and without them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import baoc
from baoc import BaocOptimizer, BaocStrategy
from baoc.config.compose import compose
from baoc.config.from_hydra import from_hydra
from baoc.config.schema import ReallocationConfig, RiskConfig
from baoc.core.budgets import parse_budget
from baoc.core.catalogue import SPECS
from baoc.core.measured import families
from baoc.core.recipes import Recipe, Tuning, tuning_of
from baoc.core.rule_tags import RULE_INFOS
from baoc.data import build_data
from baoc.models import build_model, unet
from baoc.models.pretrained import pretrained_reason
from baoc.optim.shards import is_sharded
from baoc.planning.measured import PRETRAINED_ARGUMENT
from baoc.planning.planner import Planner, PlannerSettings
from baoc.profiling import describe
from baoc.tasks.diffusion import DiffusionTask
from baoc.training.fully_sharded import cut, one_mesh
from baoc.training.session import Session, SessionSettings, without_scratch_measurements
from baoc.training.trainer import session_settings
from baoc.types import ImageDataSpec, Role, StateKind
from tests.support.ranks import group
from tests.support.tiny import tiny_trainer
from tests.support.training_runs import brief, config, run

pytestmark = pytest.mark.slow

LANGUAGE = families()["language"][0]


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return build_model("llama", spec=build_data("pysource", task="language", batch_size=2).spec, size="nano", seed=0)


def chosen(fraction: str, network: nn.Module) -> Planner:
    settings = PlannerSettings(risk="measured", family="auto")
    return Planner(describe(network), budget=parse_budget(fraction), settings=settings)


def test_a_module_s_optimizer_runs_what_the_planner_chooses_at_its_rate(llama: nn.Module):
    optimizer = BaocOptimizer(llama, budget="state_15", lr=1e-3)
    plan = chosen("state_15", llama).propose()
    assert set(optimizer.plan.allocation.choices.values()) == set(plan.allocation.choices.values())
    assert optimizer.plan.basis == plan.basis and plan.basis is not None and plan.basis.by == "measured"
    rate = LANGUAGE.recipe(str(plan.basis.recipe)).rate
    rates = {
        slot.tuned.lr for live in optimizer.registry.live.values() for slot in live.slots if slot.tuned is not None
    }
    assert rates == {rate} and rate > 1


def test_a_plan_that_raises_the_rate_says_what_keeps_it_for_pretrained_weights(llama: nn.Module):
    basis = BaocOptimizer(llama, budget="state_15", lr=1e-3).plan.basis
    assert (
        basis is not None and f"as in training from scratch: for pretrained weights {PRETRAINED_ARGUMENT}" in basis.text
    )
    held = BaocOptimizer(
        llama, budget="state_15", lr=1e-3, **eval(f"dict({PRETRAINED_ARGUMENT})")
    ).plan  # what it says works
    assert held.risk_model == "prior" and tuning_of(held) is None


def test_a_resume_keeps_the_rates_that_were_chosen_whatever_a_newer_table_has(llama: nn.Module):
    first = BaocOptimizer(llama, budget="state_15", lr=1e-3)
    saved = first.state_dict()
    saved["online"]["tuning"]["lr"] = {rule: 0.125 for rule in saved["online"]["tuning"]["lr"]}
    assert saved["online"]["tuning"]["lr"]
    again = BaocOptimizer(llama, budget="state_15", lr=1e-3)
    again.load_state_dict(saved)
    rates = {slot.tuned.lr for live in again.registry.live.values() for slot in live.slots if slot.tuned is not None}
    assert rates == {0.125}


@pytest.fixture
def saved_under(llama: nn.Module) -> Callable[[str], tuple[BaocOptimizer, dict[str, Any]]]:
    """An optimizer of the smallest size's table after a step, and its checkpoint; `step` steps one."""

    def save(budget: str) -> tuple[BaocOptimizer, dict[str, Any]]:
        optimizer = BaocOptimizer(llama, budget=budget, lr=1e-3)
        step(optimizer, llama)
        return optimizer, optimizer.state_dict()

    return save


def step(optimizer: BaocOptimizer, network: nn.Module) -> None:
    for param in network.parameters():
        param.grad = torch.full_like(param, 0.01)
    optimizer.step()


def what_runs(optimizer: BaocOptimizer) -> dict[str, str]:
    return {p.name: live.spec.name for live in optimizer.registry.live.values() for p in live.block.params}


def use_table_of_parts(monkeypatch: pytest.MonkeyPatch, *, betas: Mapping[str, tuple[float, float]] | None = None):
    """A newer table, whose best recipe names parts; with `betas` it differs from the older one in its tuning alone."""
    newer = next(size for size in families()["language"] if size.ranked(1.0)[0].name == "muon8_qk")
    if betas is not None:
        best = newer.ranked(1.0)[0]
        alike = replace(best.recipe, specs=LANGUAGE.ranked(1.0)[0].recipe.specs, lr={}, betas=betas)
        newer = replace(newer, recipes=(replace(best, recipe=alike), *newer.recipes))
    monkeypatch.setattr("baoc.planning.budgeted.families", lambda: {"language": (newer,)})


@pytest.mark.parametrize("budget", ["state_15", "state_50", "unlimited"])
@pytest.mark.parametrize("alike", [False, True])
def test_a_resume_keeps_what_ran_where_a_newer_table_has_another_recipe(
    alike: bool, budget: str, llama: nn.Module, saved_under: Any, monkeypatch: pytest.MonkeyPatch
):
    """Also under a budget that was changed, where the old one left room for the newer recipe as well."""
    first, saved = saved_under("state_15")
    use_table_of_parts(monkeypatch, betas={"muon": (0.8, 0.95)} if alike else None)
    again = BaocOptimizer(llama, budget=budget, lr=1e-3)
    assert again.plan.basis is not None and again.plan.basis.recipe == "muon8_qk"
    again.load_state_dict(saved)
    kept = tuning_of(first.plan)
    assert kept is not None and tuning_of(again.plan) == kept and what_runs(again) == what_runs(first)
    assert alike or len(again.plan.blocks) > len(first.plan.blocks)
    basis, rate = again.plan.basis, next(iter(kept.lr.values()))
    assert basis is not None and basis.text == (
        f"as the checkpoint runs it, at {rate:.3g} times the learning rate for adamw, muon; betas 0.9, 0.95 for muon"
    )
    assert (basis.by, basis.recipe, basis.change, basis.n) == ("measured", None, None, None)
    step(again, llama)
    assert what_runs(again) == what_runs(first)


def test_a_resume_of_the_same_table_keeps_its_measurements(llama: nn.Module, saved_under: Any):
    first, saved = saved_under("state_15")
    again = BaocOptimizer(llama, budget="state_50", lr=1e-3)
    again.load_state_dict(saved)
    assert again.plan.basis == first.plan.basis and "n 8, bits per byte, measured at" in again.plan.basis.text


def test_a_resume_goes_by_what_is_asked_for_now_where_a_recipe_ran(llama: nn.Module):
    saved = {name: BaocOptimizer(llama, budget="unlimited", recipe=name, lr=1e-3) for name in ("adamw", "muon8_lean")}
    faster = {"base": "muon8_lean", "lr": {"muon": 2}}

    def resumed(name: str, **settings: Any) -> tuple[BaocOptimizer, list[str]]:
        again = BaocOptimizer(llama, lr=1e-3, **settings)
        notes = again.reallocator.load_state_dict(saved[name].reallocator.state_dict())
        return again, notes

    again, _ = resumed("adamw", budget="state_15")
    assert again.plan.basis is not None and again.plan.basis.recipe == "muon8_lean_m90"
    again, _ = resumed("adamw", budget="unlimited")
    assert set(again.plan.allocation.choices.values()) == {"adamw"}, "it keeps what it runs"
    again, _ = resumed("muon8_lean", recipe=faster, budget="unlimited")
    tuning = tuning_of(again.plan)
    assert tuning is not None and tuning.lr == {"muon": 2}
    _, notes = resumed("adamw", recipe="muon8_lean", budget="state_50")
    assert "recipe=muon8_lean is what was asked for" in notes


@pytest.mark.parametrize(("old", "new"), [("state_10", "state_50"), ("state_15", "state_10")])
def test_a_resume_under_a_budget_that_asks_for_another_recipe_names_both_rates(
    old: str, new: str, llama: nn.Module, saved_under: Any, monkeypatch: pytest.MonkeyPatch
):
    first, saved = saved_under(old)
    use_table_of_parts(monkeypatch)
    again = BaocOptimizer(llama, budget=new, lr=1e-3)
    events: list[Any] = []
    again.reallocator.listeners.append(lambda event, *_: events.append(event))
    again.load_state_dict(saved)
    before, after = tuning_of(first.plan), tuning_of(again.plan)
    assert before is not None and after is not None and before != after and what_runs(again) != what_runs(first)
    (event,) = events
    assert event.why.endswith(f"; what ran at {before.text} goes on at {after.text}")
    assert f"{next(iter(before.lr.values())):.3g} times the learning rate for adamw, muon; betas" in before.text


@pytest.mark.parametrize(("tuned", "changes"), [({"lion": 2.0}, False), ({"adamw": 1.0}, False), ({"muon": 2.0}, True)])
def test_a_resume_names_rates_only_where_a_block_runs_at_another_one(
    tuned: dict[str, float], changes: bool, llama: nn.Module
):
    first = BaocOptimizer(llama, budget="unlimited", recipe="muon8_lean", lr=1e-3)
    step(first, llama)
    again = BaocOptimizer(llama, budget="unlimited", recipe={"base": "muon8_lean", "lr": tuned}, lr=1e-3)
    notes = again.reallocator.load_state_dict(first.reallocator.state_dict())
    assert any("goes on at" in note for note in notes) == changes, notes


class Trained(L.LightningModule):
    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def training_step(self, batch: torch.Tensor, batch_idx: int = 0) -> torch.Tensor:
        return nn.functional.cross_entropy(self.network(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def trained_in_a_loop(network: nn.Module, budget: str, *, path: Path, probed: bool, resumed: bool) -> tuple[Any, Any]:
    task, batch = Trained(network), torch.zeros(2, 17, dtype=torch.long)
    probe = (lambda: task.training_step(batch).backward()) if probed else None
    optimizer, events = BaocOptimizer(task, budget=budget, lr=1e-3, probe=probe), list[Any]()
    optimizer.reallocator.listeners.append(lambda event, *_: events.append(event))
    if resumed:
        optimizer.load_state_dict(torch.load(path))
    for _ in range(2):
        optimizer.zero_grad()
        task.training_step(batch).backward()
        optimizer.step()
    torch.save(optimizer.state_dict(), path)
    return optimizer.plan, events


def trained_by_lightning(
    network: nn.Module, budget: str, *, path: Path, probed: bool, resumed: bool
) -> tuple[Any, Any]:
    """Not probed: a step that fails before training, as one does that looks at its callbacks."""
    task, events = Trained(network), list[Any]()
    if not probed:
        task.automatic_optimization = False

        def step(batch: torch.Tensor, batch_idx: int) -> None:
            optimizer: Any = task.optimizers()
            optimizer.zero_grad()
            task.manual_backward(Trained.training_step(task, batch))
            optimizer.step()

        task.training_step = step
    strategy = BaocStrategy(budget, reallocation_listeners=[lambda event, *_: events.append(event)])
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", max_steps=4 if resumed else 2, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    loader: Any = DataLoader([torch.zeros(17, dtype=torch.long)] * 4, batch_size=2)
    trainer.fit(task, loader, ckpt_path=path if resumed else None, weights_only=True if resumed else None)
    trainer.save_checkpoint(path)
    return strategy.plan, events


@pytest.mark.parametrize("probed", [True, False], ids=["probed", "measured_by_its_first_step"])
@pytest.mark.parametrize("door", [trained_in_a_loop, trained_by_lightning])
def test_a_resume_keeps_its_rates_or_names_both(
    door: Callable[..., tuple[Any, Any]],
    probed: bool,
    llama: nn.Module,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Under each memory budget, in a version with a newer table: what runs on at other rates says so, once."""
    train = partial(door, llama, path=(path := tmp_path / "saved.ckpt"), probed=probed)
    plan, _ = train("8gb", resumed=False)
    beside = plan.peak_bytes - plan.allocation.state_bytes
    sizes = {"the same": 0.3, "smaller": 0.05, "larger": 2.0}
    bytes_at = {name: f"{beside + int(share * plan.state_bytes_adamw)}b" for name, share in sizes.items()}
    first, _ = train(bytes_at["the same"], resumed=False)
    saved = path.read_bytes()
    use_table_of_parts(monkeypatch)
    for budget, num_bytes in bytes_at.items():
        path.write_bytes(saved)
        again, events = train(num_bytes, resumed=True)
        before, after = (tuning_of(one) or Tuning() for one in (first, again))
        told = [event.why for event in events if "goes on at" in event.why]
        assert before.lr and [why.endswith(f"what ran at {before.text} goes on at {after.text}") for why in told] == (
            [True] if before != after else []
        )
        assert (before == after) == (budget != "smaller"), (budget, before, after)
        out = capsys.readouterr().out
        assert out.count(" goes on at ") == len(told) and out.count("nothing moved") <= 1, budget


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", ["auto", 16], ids=["decided", "pinned"])
def test_a_resumed_run_keeps_its_rates_or_names_both(micro_batch: Any, tmp_path: Path):
    def run_at(budget: str, *, folder: str, steps: int, **resume: str) -> Any:
        length = replace(config().trainer, max_steps=steps, val_check_interval=2)
        measured = {"risk": RiskConfig(name="measured"), "reallocation": ReallocationConfig(mode="off")}
        given = {"budget": parse_budget(budget), "micro_batch": micro_batch, "trainer": length, **measured, **resume}
        return run(tmp_path / folder, **given)

    def rates(folder: str) -> Tuning:
        basis = json.loads((tmp_path / folder / "allocation.json").read_text())["basis"]
        return Tuning() if basis is None else Tuning(lr=basis["lr"], betas=basis["betas"])

    with brief():
        free = run_at("8gb", folder="free", steps=2)
        beside = free.peak_bytes_predicted - free.state_bytes
        for name, share in {"same": 0.3, "smaller": 0.05, "larger": 2.0}.items():
            budget = f"{beside + int(share * free.state_bytes_adamw)}b"
            if name == "same":
                run_at(budget, folder="first", steps=2)
            assert run_at(budget, folder=name, steps=4, resume=str(tmp_path / "first")).budget_met
            events = tmp_path / name / "reallocations.jsonl"
            told = events.read_text().count(" goes on at ") if events.is_file() else 0
            changed = rates("first").text != rates(name).text
            assert told == changed, name
            # What a decision makes room for depends on seconds, which a busy machine measures otherwise.
            assert micro_batch == "auto" or changed == (name == "smaller"), name


@pytest.mark.parametrize(("by", "name"), [(None, "layers.0.attention.qk"), ("layer_role", "layers.0.attention")])
def test_blocks_that_were_asked_for_stay_through_every_door(
    by: str | None, name: str, llama: nn.Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Also those by layer and role, which without a word are the start only."""
    newer = next(size for size in families()["language"] if size.ranked(1.0)[0].name == "muon8_qk")
    monkeypatch.setattr("baoc.planning.budgeted.families", lambda: {"language": (newer,)})
    config = from_hydra(compose(["model=llama", *([f"blocks={by}"] if by else [])]))
    made = Planner(describe(llama), budget=parse_budget("state_15"), settings=session_settings(config).planner)
    given = PlannerSettings(risk="measured", family="auto", blocks_by=by or PlannerSettings().blocks_by)
    settings = SessionSettings(planner=given)
    optimizer = BaocOptimizer(llama, budget="state_15", settings=settings)
    strategy = BaocStrategy("state_15", settings=settings, device="cpu")
    batches: Any = list(torch.randint(256, (2, 16)))
    tiny_trainer(strategy=strategy, max_steps=1).fit(Module(llama), DataLoader(batches, batch_size=2))
    plans = {"run.py": made.propose(), "optimizer": optimizer.plan, "strategy": strategy.plan}
    recipes = {door: plan.basis.recipe for door, plan in plans.items() if plan.basis is not None}
    assert set(recipes.values()) == {"muon8_qk" if by is None else "muon8_lean_m90"} and len(recipes) == 3
    for door, plan in plans.items():
        assert name.replace("layers.", "layer") in [b.name.replace("layers.", "layer") for b in plan.blocks], door
    again = BaocOptimizer(
        llama, budget="state_15", recipe=Recipe(name="mine", blocks=optimizer.plan.allocation.choices)
    )
    assert again.plan.allocation.choices == optimizer.plan.allocation.choices  # as a race's plan is given


def test_names_without_a_module_are_planned_alike(llama: nn.Module):
    """Roles follow from names and shapes, so the network is known as a transformer for language."""
    named = BaocOptimizer(list(llama.named_parameters()), budget="state_15")
    plan = chosen("state_15", llama).propose()
    assert set(named.plan.allocation.choices.values()) == set(plan.allocation.choices.values())


def test_a_convolutional_net_takes_the_recipe_of_the_nearest_kind():
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.GELU(), nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(16 * 16, 10))
    basis = BaocOptimizer(net, budget="state_25", lr=1e-3).plan.basis
    assert basis is not None and (basis.by, basis.family) == ("measured", "vision")
    assert "an extrapolation from transformers for vision" in basis.text
    assert not basis.lr and "race=" not in basis.text  # weights may be pretrained, and the rate is the user's own
    theirs = torch.optim.AdamW(net.parameters(), lr=1e-3)
    assert BaocOptimizer.from_optimizer(theirs, net, budget="state_25").plan.basis == basis
    perceptron = BaocOptimizer(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), budget="state_25").plan.basis
    assert perceptron is not None and perceptron.by == "prior"


def test_a_unet_is_nearest_to_diffusion_through_every_door():
    """By its task where it has one of ours, by its structure elsewhere, though it has a table of classes."""
    sizes = {"width": 32, "levels": 2, "attention_level": 1, "layers": 1, "head_width": 0, "norm_groups": 8}
    spec = ImageDataSpec(dataset="x", image_size=16, channels=3, num_classes=10, num_train=1, num_val=1)
    net = unet.build(sizes, spec=spec)
    alone = BaocOptimizer(net, budget="state_15", lr=1e-3).plan.basis
    task = DiffusionTask(net)
    given: Any = {"params": dict(task.named_parameters()), "budget": parse_budget("state_15"), "module": task}
    session = Session(
        describe(task), settings=SessionSettings(), betas=(0.9, 0.999), device=torch.device("cpu"), **given
    )
    session.assume()
    assert session.settings.planner.task == "diffusion" and session.plan.basis == alone
    assert alone is not None and alone.family == "diffusion" and not alone.lr
    assert "an extrapolation from transformers for diffusion" in alone.text


def test_parameters_without_names_go_by_the_prior_and_lose_no_momentum(llama: nn.Module):
    loose = [nn.Parameter(param.detach().clone()) for param in llama.parameters()]  # no living module's
    optimizer = BaocOptimizer(loose, budget="state_25")
    basis = optimizer.plan.basis
    assert basis is not None and "nothing was measured of this kind of network" in basis.text
    named = Planner(describe(llama), budget=parse_budget("state_25"), settings=PlannerSettings()).propose()
    for plan in (optimizer.plan, named):  # with names the prior keeps momentum everywhere, too, embedding and head
        rules = {RULE_INFOS[SPECS[spec].rule] for spec in plan.allocation.choices.values()}
        assert all(any(state.kind is StateKind.M for state in rule.states) for rule in rules)


@pytest.mark.parametrize("fraction", ["state_50", "state_25", "state_15", "state_10"])
def test_roles_that_keep_fp32_get_8_bits_before_they_lose_momentum(fraction: str, llama: nn.Module):
    planner = Planner(describe(llama), budget=parse_budget(fraction), settings=PlannerSettings())
    plan = planner.propose()
    kept = [block for block in planner.blocks if block.role in planner.settings.keep_fp32_roles]
    for block in kept:
        rule = planner.rules[planner.specs[plan.allocation.choices[block.name]].rule]
        assert any(state.kind is StateKind.M for state in rule.states), block.name
    assert plan.allocation.state_bytes <= float(fraction.split("_")[1]) / 100 * plan.state_bytes_adamw


def test_kept_roles_stay_in_fp32_where_momentum_does_not_depend_on_it(llama: nn.Module):
    plan = Planner(describe(llama), budget=parse_budget("state_50"), settings=PlannerSettings()).propose()
    kept = {plan.allocation.choices[b.name] for b in plan.blocks if b.role in (Role.EMBEDDING, Role.HEAD, Role.NORM)}
    assert kept == {"adamw"}


class Module(L.LightningModule):
    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.network(batch).float().logsumexp(-1).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def test_a_strategy_chooses_the_same_and_steps(llama: nn.Module, tmp_path: Path):
    strategy = BaocStrategy(budget="state_15", device="cpu")
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    batches: Any = list(torch.randint(256, (4, 16)))
    trainer.fit(Module(llama), torch.utils.data.DataLoader(batches, batch_size=2))
    assert strategy.reallocator is not None
    basis, plan = strategy.reallocator.plan.basis, chosen("state_15", llama).propose()
    assert basis is not None and plan.basis is not None and basis.text == plan.basis.text
    assert set(strategy.reallocator.plan.allocation.choices.values()) == set(plan.allocation.choices.values())


def test_a_run_says_what_its_plan_rests_on(tmp_path: Path):
    from baoc.config.compose import compose
    from baoc.config.from_hydra import from_hydra
    from baoc.training.run import run

    config = from_hydra(compose(["model=llama", "model.size=nano", "budget=state_15", "mode=plan", "device=cpu"]))
    run(config, run_dir=tmp_path, command="")
    held = json.loads((tmp_path / "allocation.json").read_text())
    assert held["basis"]["by"] == "measured" and held["basis"]["family"] == "language" and held["basis"]["n"] >= 2
    assert held["basis"]["reference"] and held["basis"]["steps"] and held["basis"]["num_params"]


@pytest.mark.parametrize("door", ["loop", "strategy", "advise"])
def test_no_rate_is_raised_on_weights_that_the_network_or_the_caller_says_are_pretrained(door: str, tmp_path):
    """transformers marks what `from_pretrained` read; a loaded state dict leaves no trace: `pretrained` says it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    fresh = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=64))
    fresh.save_pretrained(tmp_path)
    read = LlamaForCausalLM.from_pretrained(tmp_path).train()

    def basis(network, **given):
        def loss(model, batch):
            return model(input_ids=batch, labels=batch).loss

        def make_batch(size):
            return torch.zeros(size, 8, dtype=torch.long)

        if door == "advise":
            found = baoc.advise(network, make_batch, loss, batch_size=2, budget="state_25", **given)
            return found.optimizer(verbose=False).plan.basis
        if door == "loop":
            return baoc.BaocOptimizer(network, budget="state_25", verbose=False, **given).plan.basis

        class Module(L.LightningModule):
            def __init__(self):
                super().__init__()
                self.inner = network

            def training_step(self, batch):
                return loss(self.inner, batch)

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters())

        strategy = baoc.BaocStrategy("state_25", verbose=False, **given)
        tiny_trainer(strategy=strategy, max_steps=1).fit(Module(), DataLoader(make_batch(2), batch_size=2))
        return strategy.plan.basis

    raised = basis(fresh)
    assert raised.by == "measured" and max(raised.lr.values()) > 1 and "pretrained=True" in raised.text
    for known in (basis(read), basis(fresh, pretrained=True)):
        assert known.by == "prior" and not known.lr
        assert "nothing was measured of pretrained weights or adapters" in known.text and "mode=race" not in known.text
    assert basis(read, pretrained=False).by == "measured"


def test_weights_that_were_read_are_known_after_the_strategy_has_cut_them_and_frozen_ones_do_not_count(tmp_path: Path):
    """fully_shard puts new parameters in the place of those that transformers marked."""
    module: Any = L.LightningModule()
    module.net, module.encoder = nn.Linear(4, 4), nn.Linear(8, 8).requires_grad_(False)
    param: Any
    for name, param in module.named_parameters():
        param._is_hf_initialized = "encoder" in name
    module.encoder.config = {"_name_or_path": "a/vae"}
    assert not pretrained_reason(module)
    module.encoder.requires_grad_(True)
    assert pretrained_reason(module) == "its weights are those of a/vae"
    module.encoder.config = {}
    assert "read by from_pretrained" in pretrained_reason(module)
    with group(0, 1, store=tmp_path / "store"):
        cpu = torch.device("cpu")
        cut(module, mesh=one_mesh(cpu), device=cpu, precision="32-true")
        assert all(map(is_sharded, module.parameters()))
        assert "read by from_pretrained" in pretrained_reason(module)
        assert SessionSettings().planner.family is not None
        assert without_scratch_measurements(SessionSettings(), network=module, pretrained=None).planner.family is None
