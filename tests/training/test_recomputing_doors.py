"""BaocOptimizer and BaocStrategy recompute as few layers of a user's own module as the budget has no room for."""

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from baoc import BaocOptimizer, BaocStrategy, advise, set_compiled
from baoc.config.schema import ReallocationConfig
from baoc.core.budgets import parse_budget
from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.models import switches
from baoc.models.switches import count_recomputed_layers, is_compiled
from baoc.parallel import SINGLE_PROCESS
from baoc.training.session import Resharding, Session, SessionSettings
from baoc.types import Footprint
from tests.support.classifier import QUIET

pytestmark = pytest.mark.slow  # they train by every door

SETTINGS = SessionSettings(reallocation=ReallocationConfig(mode="off"))
DEPTH, WIDTH, SAMPLES = 6, 16, 256


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + F.dropout(self.down(torch.tanh(self.up(tokens))), p=0.1, training=self.training)


class Own(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.data = TensorDataset(torch.randn(SAMPLES, WIDTH))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        tokens = batch[0]
        for layer in self.layers:
            tokens = layer(tokens)
        return tokens.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=SAMPLES)


def optimizer(budget: Any, **given: Any) -> tuple[Own, BaocOptimizer]:
    own = Own()
    batch = [own.data.tensors[0]]
    probe = lambda: own.training_step(batch, 0)  # noqa: E731
    return own, BaocOptimizer(own, budget=budget, probe=probe, settings=SETTINGS, verbose=False, **given)


def peak_bytes(checkpointing: Any) -> int:
    """With fp32 AdamW."""
    return optimizer("1gb", checkpointing=checkpointing)[1].plan.peak_bytes


@pytest.fixture(scope="module")
def peaks() -> list[int]:
    return [peak_bytes(number) for number in range(DEPTH + 1)]


def test_bytes_fall_with_each_layer(peaks: list[int]):
    assert peaks[0] > peaks[1] > peaks[2] > peaks[3] and peaks[DEPTH] == min(peaks)
    assert peak_bytes(True) == peaks[DEPTH] and peak_bytes(False) == peak_bytes(None) == peaks[0]


@pytest.mark.parametrize("number", [0, 2, 4])
def test_as_few_layers_as_fit_are_recomputed_through_both_doors(
    peaks: list[int], number: int, capsys: pytest.CaptureFixture[str]
):
    budget = {"memory": peaks[number] + 4096}
    own, ours = optimizer(budget, checkpointing="auto")
    assert count_recomputed_layers(own) == number
    assert ours.plan.peak_bytes == peaks[number] <= budget["memory"]
    module = Own()
    strategy = BaocStrategy(budget, settings=SETTINGS, checkpointing="auto")
    trainer = L.Trainer(strategy=strategy, max_steps=1, **QUIET)
    trainer.fit(module)
    assert count_recomputed_layers(module) == number and strategy.budget_met
    assert f"BaocStrategy: recomputed layers {number} of {DEPTH}" in " ".join(capsys.readouterr().out.split())


def test_compiled_layers_stay_compiled_through_every_door(peaks: list[int], monkeypatch: pytest.MonkeyPatch):
    """What torch would compile runs as it is here."""
    ran: list[str] = []
    monkeypatch.setattr(switches, "compiled_layers", {})

    def compiled(forward: Any, **_: Any) -> Any:
        return lambda *given: [ran.append(forward.__name__), forward(*given)][1]

    monkeypatch.setattr(torch, "compile", compiled)
    budget = {"memory": peaks[2] + 4096}
    own = Own()
    assert set_compiled(own) == DEPTH
    probe = lambda: own.training_step([own.data.tensors[0]], 0)  # noqa: E731
    plan = BaocOptimizer(own, budget=budget, probe=probe, settings=SETTINGS, verbose=False, checkpointing="auto").plan
    assert plan.peak_bytes <= budget["memory"] and count_recomputed_layers(own) == 2 and is_compiled(own)
    module = Own()
    set_compiled(module)
    strategy = BaocStrategy(budget, settings=SETTINGS, checkpointing=2)
    L.Trainer(strategy=strategy, max_steps=1, **QUIET).fit(module)
    assert strategy.budget_met and is_compiled(module)
    ran.clear()
    lone, given = Own(), {"budget": budget, "objective": "throughput", "device": "cpu"}
    set_compiled(lone)
    make = lambda size: [lone.data.tensors[0][:size]]  # noqa: E731
    loss = lambda network, batch: network.training_step(batch, 0)  # noqa: E731
    found = advise(lone, make, loss, batch_size=SAMPLES, **given)
    assert found.recompute() == count_recomputed_layers(lone) and is_compiled(lone) and ran
    set_compiled(lone, False)
    assert not is_compiled(lone)


def test_what_no_number_of_layers_fits_is_refused_and_leaves_the_module_as_it_was():
    own = Own()
    probe = lambda: own.training_step([own.data.tensors[0]], 0)  # noqa: E731
    with pytest.raises(InfeasibleBudgetError):
        BaocOptimizer(own, budget={"memory": 100_000}, probe=probe, settings=SETTINGS, checkpointing="auto")
    assert count_recomputed_layers(own) == 0


def test_a_number_that_no_longer_fits_at_its_last_look_is_refused_and_has_no_other_numbers_plan():
    """What a look measures may differ by a page from one time to the next."""
    session: Any = Session.__new__(Session)
    looked: list[int] = []
    session.module, session.device = Own(), torch.device("cpu")

    def look() -> None:
        number = count_recomputed_layers(session.module)
        if number < 3 or number in looked:
            raise InfeasibleBudgetError("a page too much", budget_bytes=1, least_feasible_bytes=2)
        looked.append(number)
        session.plan = SimpleNamespace(allocation=SimpleNamespace(risk=0.0))

    with pytest.raises(InfeasibleBudgetError, match="a page too much"):
        session.search_recomputed_layers(look, num_layers=DEPTH)
    assert looked == [DEPTH, 3]


@pytest.mark.parametrize(("checkpointing", "left"), [("auto", 0), (2, 2)])
def test_a_refusal_that_is_planned_for_again_leaves_the_module_as_it_was(checkpointing: Any, left: int):
    session: Any = Session.__new__(Session)
    session.module, session.device, session.budget = Own(), torch.device("cpu"), parse_budget("100kb")
    session.settings, session.ranks = SessionSettings(checkpointing=checkpointing), SINGLE_PROCESS

    def plan() -> None:
        session.recompute(2)
        session.plan = SimpleNamespace(least_feasible_bytes=200_000)
        if session.budget.memory_bytes != 200_000:
            raise BadInputError("no room for a look that may be larger")

    refusal = InfeasibleBudgetError("too small", budget_bytes=100_000, least_feasible_bytes=300_000)
    assert session.confirm_refusal(refusal, replan=plan) is refusal and count_recomputed_layers(session.module) == left


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("in forward"), InfeasibleBudgetError("no", budget_bytes=1, least_feasible_bytes=2), None],
)
def test_layers_that_stay_gathered_only_where_a_look_at_them_has_room(error: Exception | None):
    session: Any = Session.__new__(Session)
    session.settings, session.device, session.ranks = SessionSettings(), torch.device("cpu"), SINGLE_PROCESS
    session.module, session.layers_summary, session.reshards = None, "", None
    session.budget, switched = parse_budget("1mb"), list[bool]()
    plan = SimpleNamespace(allocation=SimpleNamespace(risk=0.5))
    session.planner_for = lambda *_, **__: SimpleNamespace(propose=lambda: plan)
    sizes: dict[str, Any] = {
        "weights_bytes": 1,
        "gradients_bytes": 1,
        "forward_backward_bytes": 3,
        "validation_bytes": 1,
    }
    footprint = Footprint(device="cpu", micro_batch=1, resident_bytes=2, **sizes)

    def look() -> None:
        if error is not None and not session.reshards:
            raise error
        session.plan, session.planner = plan, SimpleNamespace(footprint=footprint)

    session.search_resharding(look, Resharding(switch=switched.append, num_bytes=10))
    assert switched == [True, False, *([True] if error else [])] and session.reshards == bool(error)


def test_layers_that_do_something_else_again_are_kept(peaks: list[int], caplog: pytest.LogCaptureFixture):
    class Appending(Layer):
        def forward(self, tokens: Tensor) -> Tensor:
            cache.append(tokens)
            return super().forward(torch.cat([tokens, tokens]) if len(cache) > DEPTH else tokens)[: len(tokens)]

    cache: list[Tensor] = []
    own = Own()
    own.layers = nn.ModuleList(Appending() for _ in range(DEPTH))

    def probe() -> Tensor:
        cache.clear()
        return own.training_step([own.data.tensors[0]], 0)

    with pytest.raises(InfeasibleBudgetError):
        BaocOptimizer(own, budget={"memory": peaks[3]}, probe=probe, settings=SETTINGS, checkpointing="auto")
    assert "cannot be recomputed" in caplog.text and count_recomputed_layers(own) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"params": [nn.Parameter(torch.ones(2, 2))], "checkpointing": 1}, "is about the layers of a module.*model="),
        ({"params": nn.Linear(2, 2), "checkpointing": True}, "Linear names no parts .* set checkpointing=False, or"),
        ({"params": Own(), "checkpointing": 7}, "^checkpointing=7 is more than the 6 layers of model Own: give 0 to 6"),
        (
            {"params": Own(), "checkpointing": "auto"},
            "checkpointing='auto' looks at steps before training: give pr",
        ),
    ],
)
def test_what_cannot_be_recomputed_is_told(given: dict[str, Any], message: str):
    with pytest.raises(BadInputError, match=message):
        BaocOptimizer(given.pop("params"), budget="8gb", settings=SETTINGS, **given)
