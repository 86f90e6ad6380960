"""BaocStrategy around modules that know nothing of it: what is kept, what is refused, and that AdamW stays AdamW."""

import inspect
import re
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from baoc import BaocOptimizer, BaocStrategy
from baoc.config.schema import ReallocationConfig
from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.planning.planner import PlannerSettings
from baoc.profiling import memory
from baoc.training import lightning as strategy_module
from baoc.training.measure.probe import Probe
from baoc.training.session import SessionSettings
from tests.support.classifier import QUIET, Classifier, fit, loader, same
from tests.support.sessions import session


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_budget_that_does_not_bind_gives_adamw_bit_for_bit(clip):
    plain = fit("auto", gradient_clip_val=clip, steps=20)
    ours = fit(BaocStrategy("8gb"), gradient_clip_val=clip, steps=20)
    assert same(plain, ours)
    different = fit(BaocStrategy("state_10"), gradient_clip_val=clip, steps=20)
    assert not same(plain, different)


@pytest.mark.parametrize("door", [BaocStrategy, BaocOptimizer])
def test_editors_and_command_lines_see_every_setting_of_a_door(door):
    told = re.search(r"\n    Args:\n(.*?)\n\n", str(door.__doc__), re.DOTALL)
    assert told is not None
    names = {name for words in re.findall(r"^        ([\w, ]+):", told[1], re.MULTILINE) for name in words.split(", ")}
    assert len(names) > 5 and names <= set(inspect.signature(door).parameters)


def test_the_probe_leaves_random_numbers_buffers_and_the_loader_alone():
    class Noisy(Classifier):
        def __init__(self):
            super().__init__()
            self.net.insert(1, nn.Dropout(0.5))
            self.net.insert(2, nn.BatchNorm1d(32))

    torch.manual_seed(0)
    plain = fit("auto", module=Noisy(), steps=10)
    torch.manual_seed(0)
    ours = fit(BaocStrategy("8gb"), module=Noisy(), steps=10)
    assert same(plain, ours)
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), ours.buffers(), strict=True))


def test_after_a_fit_no_backend_holds_on_to_weights_and_states():
    during, after = [], []

    class Watched(BaocStrategy):
        def teardown(self):
            registry = self.reallocator.optimizer.registry
            during.append(bool(registry.all_backends.backends))
            super().teardown()
            after.append(bool(registry.all_backends.backends))

    fit(Watched("8gb"))
    assert during == [True] and after == [False]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize(("clip", "algorithm"), [(None, None), (0.5, "norm"), (0.01, "value")])
@pytest.mark.filterwarnings("ignore:16-bit weights without correction")
def test_precision_and_clipping_work_together(precision, clip, algorithm):
    module = fit(
        BaocStrategy("state_25"),
        precision=precision,
        gradient_clip_val=clip,
        gradient_clip_algorithm=algorithm,
        steps=12,
    )
    before = Classifier()
    moved = [not torch.equal(p.float(), q) for p, q in zip(module.parameters(), before.parameters(), strict=True)]
    # a norm's weight of 1 in bf16 is out of reach of these steps, which is what the warning says
    assert sum(moved) >= 4 if precision == "bf16-true" else all(moved)
    assert all(p.isfinite().all() for p in module.parameters())


def test_a_look_counts_for_less_than_the_decision_where_it_takes_pages_more_alone(monkeypatch):
    strategy = BaocStrategy("8gb")
    fit(strategy, steps=1)
    decided = strategy.reallocator.planner.footprint
    assert decided is not None
    look = replace(decided, reserve_bytes=decided.reserve_bytes + 512)
    for page, nearest in ((512, decided), (511, look)):
        monkeypatch.setattr("baoc.training.session.PAGES_BYTES", page)
        assert session("8gb").known_or_measured(look, known=decided) == nearest


def test_accumulation_equals_one_large_batch():
    small = fit(BaocStrategy("state_25"), data=loader(batch_size=8), accumulate_grad_batches=4, steps=6)
    large = fit(BaocStrategy("state_25"), data=loader(batch_size=32), steps=6)
    for p, q in zip(small.parameters(), large.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-4, atol=2e-5)


def test_groups_and_schedule_are_the_users(tmp_path):
    strategy = BaocStrategy("state_25")
    monitor = LearningRateMonitor(logging_interval="step", log_momentum=True)
    fit(strategy, steps=5, callbacks=[monitor], logger=CSVLogger(tmp_path))
    groups = strategy.optimizers[0].param_groups
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert [g["lr"] for g in groups] == pytest.approx([1e-2 / 6, 3e-3 / 6])


def test_a_nan_gradient_is_masked_before_clipping():
    class Poisoned(Classifier):
        def on_after_backward(self) -> None:
            if self.global_step == 2:
                self.net[0].weight.grad[0, 0] = float("nan")

    module = Poisoned()
    start = module.net[0].weight.detach().clone()
    strategy = BaocStrategy("8gb")
    fit(strategy, module=module, gradient_clip_val=0.1, steps=3)
    optimizer = strategy.reallocator.optimizer
    assert optimizer.num_nonfinite == 1
    assert all(p.isfinite().all() for p in module.parameters())
    assert not torch.equal(start[1:], module.net[0].weight[1:])


def test_an_impossible_budget_ends_before_training_and_says_what_is_least():
    module = Classifier()
    before = [p.detach().clone() for p in module.parameters()]
    settings = SessionSettings(planner=PlannerSettings(specs=("adamw",)))
    with pytest.raises(
        InfeasibleBudgetError, match=r"budget state_50 cannot be met.*least feasible is .*What would lower it"
    ):
        fit(BaocStrategy("state_50", settings=settings), module=module)
    assert all(torch.equal(p, q) for p, q in zip(before, module.parameters(), strict=True))


def test_the_least_feasible_memory_budget_is_exact():
    with pytest.raises(InfeasibleBudgetError) as caught:
        fit(BaocStrategy("1kb"))
    least = caught.value.least_feasible_bytes
    strategy = BaocStrategy(least)
    fit(strategy, steps=2)
    assert strategy.reallocator.plan.peak_bytes <= least
    with pytest.raises(InfeasibleBudgetError, match=f"least feasible is .*{least} bytes"):
        fit(BaocStrategy(least - 1))


def test_fit_twice_with_one_trainer():
    module, strategy = Classifier(), BaocStrategy("state_25")
    trainer = L.Trainer(strategy=strategy, max_steps=3, **QUIET)
    trainer.fit(module, loader())
    first = strategy.reallocator
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(module, loader())
    assert (first.step, strategy.reallocator.step, trainer.global_step) == (3, 3, 6)
    assert strategy.reallocator.optimizer.state_bytes() == strategy.reallocator.plan.allocation.state_bytes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), "configure_optimizers returned SGD.*torch.optim.AdamW"),
        (lambda _: None, "configure_optimizers returned None: BAOC takes over"),
        (lambda m: torch.optim.Adam(m.parameters(), weight_decay=0.1), "Adam with coupled weight decay"),
        (lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True), "amsgrad=True.*leave it out"),
        (
            lambda m: torch.optim.AdamW([nn.Parameter(torch.ones(3))]),
            "parameter .*of shape .3,. that the module does not have: register it",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*configure_optimizers:UserWarning")
def test_optimizers_that_cannot_be_taken_over_are_refused(make, message):
    with pytest.raises(BadInputError, match=message):
        fit(BaocStrategy("8gb"), module=Classifier(make=make))


def test_several_devices_are_refused():
    with pytest.raises(BadInputError, match=r"BaocStrategy trains on one device\. Use BaocDDPStrategy, which"):
        fit(BaocStrategy("8gb"), devices=2)
    with pytest.raises(BadInputError, match="device='mps' is not supported"):
        BaocStrategy("8gb", device="mps")


def test_two_optimizers_are_refused():
    class Two(Classifier):
        def configure_optimizers(self) -> Any:
            params = list(self.parameters())
            return [torch.optim.AdamW(params[:2]), torch.optim.AdamW(params[2:])]

    with pytest.raises((BadInputError, RuntimeError), match="optimizers"):
        fit(BaocStrategy("8gb"), module=Two())


def test_statistics_move_blocks_after_warm_up():
    settings = SessionSettings(
        planner=PlannerSettings(risk="statistics"), reallocation=ReallocationConfig(mode="once", warmup_steps=6)
    )
    events = []
    strategy = BaocStrategy("state_25", settings=settings, reallocation_listeners=[lambda e, p, s: events.append(e)])
    fit(strategy, steps=10)
    assert [event.step for event in events] == [6]
    assert strategy.reallocator.optimizer.state_bytes() == strategy.reallocator.plan.allocation.state_bytes
    assert strategy.reallocator.profiler is None


@pytest.mark.slow
@pytest.mark.parametrize("narrow", [False, True])
def test_the_cap_is_back_after_a_look_without_it(monkeypatch, narrow):
    """The first look runs out of memory, the second one fits: training must not go on without its cap.

    Where a plan may keep weights in 16 bits, the second look has them so, and needs no more than the cap.
    """
    calls: list[str] = []
    look = Probe.footprint

    def footprint(probe: Probe, *args: Any, **kwargs: Any) -> Any:
        types = {param.dtype for param in probe.module.parameters()}
        calls.append("narrow look" if torch.bfloat16 in types else "look")
        if len([call for call in calls if "look" in call]) == 1:
            raise torch.OutOfMemoryError("no memory")
        return look(probe, *args, **kwargs)

    monkeypatch.setattr(Probe, "footprint", footprint)
    for module in (strategy_module, memory):
        monkeypatch.setattr(module, "cap_device", lambda device, *, budget: calls.append("cap"))
    monkeypatch.setattr(memory, "uncap_device", lambda device: calls.append("uncap"))
    planner = PlannerSettings(specs=("*", "*+split8") if narrow else ("*",))
    plan = BaocStrategy("8gb", settings=SessionSettings(planner=planner))
    fit(plan, steps=2, **({"precision": "bf16-mixed"} if narrow else {}))
    assert calls == ["cap", "look", "narrow look"] if narrow else ["cap", "look", "uncap", "look", "cap"]
