"""What a refusal names is enough in the next process, and a byte less is not, though its meter is a page off.

Bytes on a CPU are the same in each process. Here a stand-in for a GPU's meter adds what a "process" measures more: up
to OFF it is the same step, and CHANGED stands for one that some helper, flag or closure has changed.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from baoc import BaocOptimizer, BaocStrategy
from baoc.cache import CACHE_VARIABLE
from baoc.config.schema import ReallocationConfig
from baoc.core.budgets import parse_budget
from baoc.errors import InfeasibleBudgetError
from baoc.profiling.caller_probe import CallerProbe
from baoc.profiling.cuda_emulation import SMALL_PAGE
from baoc.profiling.tracker import PeakMeter
from baoc.training import run as training
from baoc.types import Budget
from baoc.units import MIB
from tests.support.classifier import Classifier, fit, loader
from tests.support.ranks import group, in_processes
from tests.support.training_runs import brief, config

pytestmark = pytest.mark.slow  # they plan again and again

Door = Callable[[int, Path], object]
OFF, CHANGED = 17_500_000, 64 * MIB  # the most by which recorded processes were apart, and more than any page


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch):
    """Whatever ran in this process before: inputs are not looked at where something was compiled."""
    monkeypatch.setitem(counters, "frames", Counter())


class Process:
    """`more`: bytes that this process measures more."""

    more = 0


@pytest.fixture(autouse=True, scope="module")
def trains_briefly() -> Iterator[None]:
    """With a layer more than other tests: of one, the activations leave no choice."""
    with brief(depth=2):
        yield


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Process:
    one = Process()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    measure_as(one, patch=monkeypatch)
    return one


def measure_as(process: Process, *, patch: pytest.MonkeyPatch) -> None:
    counted = PeakMeter.peak_bytes.fget
    assert counted is not None

    def peak_bytes(meter: PeakMeter) -> int:
        return counted(meter) + process.more

    patch.setattr(PeakMeter, "peak_bytes", property(peak_bytes))
    patch.setattr("baoc.profiling.memory.MAX_CONFIRMATIONS", 4)  # what is named is enough, if not the least
    for module in ("session", "plain_loop", "measure.microbatch_search"):
        patch.setattr(f"baoc.training.{module}.confirms", lambda *_, **__: True)


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


def plain_loop(num_bytes: int, _: Path, *, batch_size: int = 64, repeats: int = 1) -> object:
    model = Classifier().net
    batch = torch.randn(batch_size, 16)

    def loss() -> torch.Tensor:
        return model(batch).repeat(repeats, 1).square().mean()

    optimizer = BaocOptimizer(model, budget=f"{num_bytes}b", probe=loss, verbose=False)
    for _step in range(2):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return optimizer


DOORS = [
    pytest.param(decided, id="run.py, decided"),
    pytest.param(command, id="run.py"),
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
    process.more = 20 * MIB
    first = refusal(door, 4000, tmp_path)
    least = first.least_feasible_bytes
    assert least > 4000 + process.more
    for more in (process.more - OFF, process.more + OFF):
        process.more = more
        for less in (least - 1, 4000):
            again = refusal(door, less, tmp_path / f"{more}")
            said = [str(error).partition("bytes), ")[2] for error in (first, again)]
            assert said[0] == said[1] and f"{least} bytes" in said[0], "by the same sentence"
            assert again.least_feasible_bytes == least
        door(least, tmp_path / f"{more}")


def budgets_of_a_rank(rank: int, size: int, store: Path, *, more: int, budgets: list[int]) -> list[int]:
    """What is named for each budget; 0 where it trains."""
    process, named = Process(), list[int]()
    process.more = more + rank * SMALL_PAGE
    with group(rank, size, store=store), pytest.MonkeyPatch.context() as patch:
        measure_as(process, patch=patch)
        for num_bytes in budgets:
            try:
                plain_loop(num_bytes, store)
                named.append(0)
            except InfeasibleBudgetError as error:
                named.append(error.least_feasible_bytes)
    return named


def test_ranks_name_what_the_first_of_them_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    first, same = in_processes(partial(budgets_of_a_rank, more=20 * MIB, budgets=[4000]))
    (least,) = first
    assert first == same and least > 4000 + 20 * MIB and len(list((tmp_path / "cache").glob("decision-*"))) == 1
    for more in (20 * MIB - OFF, 20 * MIB + OFF):
        ranks = in_processes(partial(budgets_of_a_rank, more=more, budgets=[least - 1, 4000, least]))
        assert ranks == [[least, least, 0]] * 2


@pytest.mark.parametrize("door", DOORS)
def test_a_step_that_has_changed_is_named_anew(door: Door, process: Process, tmp_path: Path):
    process.more = CHANGED
    first = refusal(door, 4000, tmp_path).least_feasible_bytes
    process.more = 0
    door(first - CHANGED // 2, tmp_path / "lean")
    lean = refusal(door, 4000, tmp_path / "lean").least_feasible_bytes
    assert lean < first - CHANGED // 2
    door(lean, tmp_path / "lean")
    process.more = CHANGED
    assert refusal(door, lean, tmp_path / "again").least_feasible_bytes > lean + CHANGED // 2


def test_a_loss_that_the_key_does_not_know_is_named_anew(process: Process, tmp_path: Path):
    def wide(num_bytes: int, folder: Path) -> object:
        return plain_loop(num_bytes, folder, repeats=9000)

    least = refusal(wide, 4000, tmp_path).least_feasible_bytes
    plain_loop(least // 2, tmp_path)
    lean = refusal(plain_loop, 4000, tmp_path).least_feasible_bytes
    assert refusal(wide, lean, tmp_path).least_feasible_bytes == least > lean + CHANGED // 2


def test_each_run_at_what_was_named_writes_the_option_that_it_takes(process: Process, tmp_path: Path):
    process.more = SMALL_PAGE // 2
    least = refusal(decided, 4000, tmp_path).least_feasible_bytes
    process.more = SMALL_PAGE
    tables: list[str] = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        decided(least, folder)
        tables.append((folder / f"{least}" / "options.csv").read_text())
    assert tables[0] == tables[1] and len(tables[0].splitlines()) > 1
    assert "True" in tables[0], "one is chosen"


class Lazy(dict[str, torch.Tensor]):
    def items(self) -> Any:
        raise OSError("this would load all")


def endless() -> list[Any]:
    inner: list[Any] = [torch.ones(2, 3)]
    inner.append(inner)
    return inner


@pytest.mark.parametrize(
    ("given", "known"),
    [
        (Lazy(x=torch.ones(2, 3)), None),
        (endless(), None),
        ([torch.ones(2, 3), object()], None),
        ([torch.ones(2, 3), 7, None], [[[2, 3], "torch.float32"], 7, None]),
    ],
)
@pytest.mark.parametrize("looks", [True, False])
def test_a_look_at_inputs_never_ends_a_loop(given: Any, known: Any, looks: bool):
    class Network(torch.nn.Linear):
        def forward(self, input: Any) -> torch.Tensor:
            return super().forward(input["x"] if isinstance(input, dict) else input[0])

    network = Network(3, 3)
    probe = CallerProbe(lambda: network(given).sum(), source=network, looks=looks)
    probe.footprint(context_bytes=0)
    assert probe.inputs == ([[[known], {}]] if looks and known else None)


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
