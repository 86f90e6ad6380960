"""Data without a length that end on one rank alone: all ranks say which, before a step in which they would wait."""

from types import SimpleNamespace
from typing import Any

import pytest

from baoc.errors import TrainingFailedError
from baoc.parallel import Ranks
from baoc.training.lightning import refuse_uneven_end


class Asked(Ranks):
    """Ranks of which some have no batch after this one."""

    def __init__(self, *done: bool):
        self.done, self.size, self.asked = done, len(done), 0

    def all_gather_number(self, number: float) -> tuple[float, ...]:
        self.asked += 1
        return tuple(map(float, self.done))


def trainer(*, length: int | None = None, **changes: Any) -> Any:
    given = {"num_training_batches": float("inf"), "max_steps": -1, "global_step": 3, "accumulate_grad_batches": 1}
    fetcher = SimpleNamespace(length=length, done=False)
    return SimpleNamespace(fit_loop=SimpleNamespace(_data_fetcher=fetcher), **given | changes)


@pytest.mark.parametrize(
    ("done", "named"), [((True, False), "rank 0 ended"), ((False, True, True), "rank 1, 2 ended with batch 6 of")]
)
def test_the_ranks_whose_data_end_first_are_named(done: tuple[bool, ...], named: str) -> None:
    with pytest.raises(TrainingFailedError, match=rf"{named}.*set limit_train_batches to at most 6$"):
        refuse_uneven_end(trainer(), batch_idx=5, among=Asked(*done))


@pytest.mark.parametrize(
    ("changes", "done", "asked"),
    [
        ({}, (True, True), 1),
        ({}, (False, False), 1),
        ({"num_training_batches": 6}, (True, False), 0),
        ({"max_steps": 4}, (True, False), 0),
        ({"max_steps": 4, "accumulate_grad_batches": 2}, (True, False), 0),
        ({"length": 9}, (True, False), 0),
    ],
)
def test_ranks_whose_training_ends_together_go_on(changes: dict[str, Any], done: tuple[bool, ...], asked: int) -> None:
    among = Asked(*done)
    refuse_uneven_end(trainer(**changes), batch_idx=5, among=among)
    assert among.asked == asked


def test_a_last_step_that_wants_more_micro_batches_is_not_the_end() -> None:
    with pytest.raises(TrainingFailedError, match="ended with batch 5 of"):
        refuse_uneven_end(trainer(max_steps=4, accumulate_grad_batches=2), batch_idx=4, among=Asked(True, False))
