"""Micro-batch, checkpointing and allocation chosen together, on a CPU: pins, refusals, and that the choice holds."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn

from baoc import train as training
from baoc.budgets import parse_budget
from baoc.config.schema import ModelConfig, ReallocationConfig
from baoc.decision import axes_of, choose
from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.tasks.base import Task
from baoc.types import Option, RunResult
from tests.integration.test_run import config
from tests.tiny import LIGHTNING_NOISE
from tests.unit.test_options import option

pytestmark = [
    LIGHTNING_NOISE,
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*smaller than the logging interval.*"),
]
TIGHT = "4.2mb"  # AdamW fits with 8 samples at once, and not with 16


def run(run_dir: Path, **changes: Any) -> RunResult:
    run_dir.mkdir(parents=True, exist_ok=True)
    given = {
        "micro_batch": "auto",
        "budget": parse_budget(TIGHT),
        "trainer": replace(config().trainer, max_steps=4),
        "reallocation": ReallocationConfig(mode="off"),  # samples of gradients would take more than activations here
    }
    settings = config(**(given | changes))
    result = training.run(settings, run_dir=run_dir, command="python run.py")
    assert result is not None
    return result


def rows(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "options.csv").open() as file:
        return list(csv.DictReader(file))


def chosen(run_dir: Path) -> dict[str, str]:
    (row,) = [row for row in rows(run_dir) if row["chosen"] == "True"]
    return row


def test_the_option_that_is_run_holds_what_was_predicted(tmp_path: Path):
    run_dir = tmp_path / "day" / "auto"
    result = run(run_dir)
    row = chosen(run_dir)
    assert len(rows(run_dir)) == 12  # six micro-batches of 32 samples, with and without recomputing
    assert result.budget_met and result.peak_bytes <= int(row["peak_bytes"])
    assert result.peak_bytes >= 0.95 * result.peak_bytes_predicted
    assert json.loads((run_dir / "decision.json").read_text())["micro_batch"] == int(row["micro_batch"])
    assert float(row["risk"]) == min(float(r["risk"]) for r in rows(run_dir) if r["risk"])


def test_what_is_pinned_stays(tmp_path: Path):
    run_dir = tmp_path / "day" / "pinned"
    model = ModelConfig(options={"dropout": 0.1}, checkpointing=True)
    run(run_dir, model=model, objective="throughput", budget=parse_budget("8gb"))
    assert {row["checkpointing"] for row in rows(run_dir)} == {"True"}
    run_dir = tmp_path / "day" / "size"
    run(run_dir, micro_batch=8, objective="balanced", budget=parse_budget("8gb"))
    assert {row["micro_batch"] for row in rows(run_dir)} == {"8"} and chosen(run_dir)["accumulation"] == "4"


def test_a_resumed_run_goes_on_with_what_was_decided(tmp_path: Path):
    run_dir = tmp_path / "day" / "first"
    run(run_dir)
    decided = (run_dir / "decision.json").read_text()
    (run_dir / "options.csv").unlink()
    again = run(run_dir, resume="auto", trainer=replace(config().trainer, max_steps=6), objective="throughput")
    assert again.num_steps == 6 and (run_dir / "decision.json").read_text() == decided
    assert not (run_dir / "options.csv").exists()  # nothing was decided anew
    later = tmp_path / "later" / "first"
    run(later, resume=str(run_dir), trainer=replace(config().trainer, max_steps=7), objective="throughput")
    assert (later / "decision.json").read_text() == decided, "for whoever resumes from this run"


def test_no_option_fits_says_the_least_and_which_pin_is_in_the_way(tmp_path: Path):
    with pytest.raises(
        InfeasibleBudgetError, match=r"cannot be met by any of 12 options.*\(32 x 1, recomputed"
    ) as caught:
        run(tmp_path / "day" / "none", budget=parse_budget("1mb"))
    assert caught.value.least_feasible_bytes > 2**20
    with pytest.raises(InfeasibleBudgetError, match="a smaller micro_batch than the 32 that was asked for"):
        run(tmp_path / "day" / "large", budget=parse_budget("3mb"), micro_batch=32, objective="throughput")


def test_a_network_without_parts_to_recompute_says_so():
    """Left open, it is planned without; asked for, it is refused."""
    task = cast(Task, SimpleNamespace(model=nn.Linear(2, 2)))
    assert axes_of(config(micro_batch="auto"), task=task).checkpointing == (False,)
    asked = config(micro_batch="auto", model=ModelConfig(checkpointing=True))
    with pytest.raises(
        BadInputError, match="model vit names no parts whose activations could be recomputed: set model"
    ):
        axes_of(asked, task=task)


def test_what_contradicts_itself_is_refused(tmp_path: Path):
    with pytest.raises(BadInputError, match=r"micro_batch=auto tries micro-batches at trainer\.precision=32-true or"):
        run(tmp_path / "day" / "precision", trainer=replace(config().trainer, precision="bf16-true"))
    with pytest.raises(BadInputError, match="micro_batch=5 does not divide batch_size=32"):
        run(tmp_path / "day" / "part", micro_batch=5)


def test_an_option_that_is_slower_than_its_line_promised_gives_way(monkeypatch: pytest.MonkeyPatch):
    """The fastest by prediction is tried first; what it really takes counts, and only what was tried is chosen."""
    promised, real = {1: 10.0, 8: 80.0, 64: 640.0}, {1: 10.0, 8: 70.0, 64: 60.0}
    known: list[int] = []

    def options() -> list[Option]:
        return [option(size, rate=(real if size in known else promised)[size], risk=0.01 * size) for size in promised]

    def tried(found: Option) -> list[Option]:
        known.append(found.micro_batch)
        return options()

    after, chosen = choose(options(), objective="throughput", tried=tried)
    assert known == [64, 8] and chosen is not None
    assert (chosen.micro_batch, chosen.samples_per_s, chosen.chosen) == (8, 70.0, True)
    assert [o.micro_batch for o in after if o.chosen] == [8]
    nothing = [replace(o, risk=None) for o in options()]
    assert choose(nothing, objective="throughput", tried=tried) == (nothing, None)
    monkeypatch.setattr("baoc.decision.VERIFIED", 1)
    known.clear()
    assert getattr(choose(options(), objective="throughput", tried=tried)[1], "micro_batch", None) == 64
