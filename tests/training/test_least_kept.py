"""What a refusal names is enough in the next process, and a byte less is not, though its meter is a page off.

Bytes on a CPU are the same in each process. Here a stand-in for a GPU's meter adds what a "process" measures more.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baoc import BaocOptimizer, BaocStrategy
from baoc.cache import CACHE_VARIABLE
from baoc.config.schema import ReallocationConfig
from baoc.core.budgets import parse_budget
from baoc.errors import InfeasibleBudgetError
from baoc.profiling.cuda_emulation import SMALL_PAGE
from baoc.profiling.tracker import PeakMeter
from baoc.training import run as training
from baoc.types import Budget
from tests.support.classifier import Classifier, fit, loader
from tests.support.training_runs import brief, config

Door = Callable[[int, Path], object]


class Process:
    """`more`: bytes that this process measures more."""

    more = 0


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    one, counted = Process(), PeakMeter.peak_bytes.fget
    assert counted is not None

    def peak_bytes(meter: PeakMeter) -> int:
        return counted(meter) + one.more

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(PeakMeter, "peak_bytes", property(peak_bytes))
    monkeypatch.setattr("baoc.training.session.MAX_CONFIRMATIONS", 4)  # what is named is enough, if not the least
    for module in ("session", "measure.microbatch_search"):
        monkeypatch.setattr(f"baoc.training.{module}.confirms", lambda _: True)
    with brief():
        yield one


def command(num_bytes: int, folder: Path, **changes: Any) -> object:
    given = {"reallocation": ReallocationConfig(mode="off"), "trainer": replace(config().trainer, max_steps=2)}
    run_dir = folder / f"{num_bytes}"
    run_dir.mkdir(parents=True, exist_ok=True)
    asked = config(**({"budget": parse_budget(f"{num_bytes or 1}b")} | given | changes))
    return training.run(asked, run_dir=run_dir, command="python run.py")


def decided(num_bytes: int, folder: Path) -> object:
    return command(num_bytes, folder, micro_batch="auto")


def strategy(num_bytes: int, _: Path, *, batch_size: int = 64) -> object:
    return fit(BaocStrategy(f"{num_bytes}b"), data=loader(batch_size=batch_size), steps=2)


def plain_loop(num_bytes: int, _: Path, *, batch_size: int = 64) -> object:
    model = Classifier().net
    batch = torch.randn(batch_size, 16)

    def loss() -> torch.Tensor:
        return model(batch).square().mean()

    optimizer = BaocOptimizer(model, budget=f"{num_bytes}b", probe=loss, verbose=False)
    for _step in range(2):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return optimizer


DOORS = [
    pytest.param(decided, id="run.py, decided", marks=pytest.mark.slow),
    pytest.param(command, id="run.py", marks=pytest.mark.slow),
    pytest.param(strategy, id="BaocStrategy"),
    pytest.param(plain_loop, id="BaocOptimizer"),
]


def refusal(door: Door, num_bytes: int, folder: Path) -> InfeasibleBudgetError:
    with pytest.raises(InfeasibleBudgetError) as caught:
        door(num_bytes, folder)
    return caught.value


@pytest.mark.parametrize("door", DOORS)
def test_what_one_process_names_trains_in_the_next_and_a_byte_less_is_refused(
    door: Door, process: Process, tmp_path: Path
):
    process.more = SMALL_PAGE // 2
    first = refusal(door, 4000, tmp_path)
    least = first.least_feasible_bytes
    assert least > 4000 + process.more
    for more in (0, SMALL_PAGE):
        process.more = more
        for less in (least - 1, 4000):
            again = refusal(door, less, tmp_path / f"{more}")
            said = [str(error).partition("bytes), ")[2] for error in (first, again)]
            assert said[0] == said[1] and f"{least} bytes" in said[0], "by the same sentence"
            assert again.least_feasible_bytes == least
        door(least, tmp_path / f"{more}")


@pytest.mark.parametrize("door", DOORS[1:])
def test_without_what_was_kept_the_next_process_goes_by_what_it_measures(
    door: Door, process: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    process.more = SMALL_PAGE
    least = refusal(door, 4000, tmp_path).least_feasible_bytes
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "other"))
    process.more = 0
    door(least - 1, tmp_path / "less")


@pytest.mark.parametrize(
    "damage", [lambda text: text[:-9], lambda text: text.replace('"num_bytes": 2', '"num_bytes": 9')]
)
def test_a_damaged_file_refuses_nothing(damage: Callable[[str], str], process: Process, tmp_path: Path):
    process.more = SMALL_PAGE
    least = refusal(plain_loop, 4000, tmp_path).least_feasible_bytes
    (file,) = (tmp_path / "cache").glob("decision-*.json")
    assert damage(file.read_text()) != file.read_text()
    file.write_text(damage(file.read_text()))
    process.more = 0
    plain_loop(least - 1, tmp_path)


@pytest.mark.slow
def test_a_run_without_a_budget_is_not_refused_by_what_was_named(process: Process, tmp_path: Path):
    refusal(decided, 4000, tmp_path)
    command(0, tmp_path / "unlimited", micro_batch="auto", budget=Budget(name="unlimited"))


@pytest.mark.parametrize("door", [strategy, plain_loop])
def test_a_smaller_batch_is_not_refused_by_what_a_larger_one_needed(door: Any, process: Process, tmp_path: Path):
    least = refusal(door, 4000, tmp_path).least_feasible_bytes
    assert refusal(door, least - 1, tmp_path).least_feasible_bytes == least
    door(least - 1, tmp_path, batch_size=32)
    assert refusal(lambda *given: door(*given, batch_size=32), 4000, tmp_path).least_feasible_bytes < least


def test_a_loop_that_compiles_is_not_looked_into(process: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A hook on its network would have it compiled twice. So nothing is known of its step, and nothing is kept."""
    from torch._dynamo.utils import counters

    monkeypatch.setitem(counters["frames"], "total", 1)
    monkeypatch.setattr(torch.nn.Module, "register_forward_pre_hook", None)
    refusal(plain_loop, 4000, tmp_path)
    assert not list((tmp_path / "cache").glob("decision-*.json"))
