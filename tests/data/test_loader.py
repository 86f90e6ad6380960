"""In-memory loaders: sizes, order, accumulation, position, and that the global random state is left alone."""

import errno
from itertools import chain

import pytest
import torch

from baoc.data.loader import SequentialLoader, ShuffledLoader
from baoc.errors import BadInputError, CheckpointError, TrainingFailedError

ROWS = {"x": torch.arange(103)}


def shuffled(**settings) -> ShuffledLoader:
    return ShuffledLoader(ROWS, **{"batch_size": 10, "seed": 5, **settings})


def flat(batches: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def rows(batches) -> list[list[int]]:
    return [batch["x"].tolist() for batch in batches]


def test_sequential_gives_every_row_once_in_order():
    loader = SequentialLoader(ROWS, batch_size=10)
    got = rows(loader)
    assert len(loader) == len(got) == 11
    assert flat(got) == list(range(103))
    assert len(got[-1]) == 3


class Failing:
    """Samples on a disk that fails."""

    def __len__(self) -> int:
        return 4

    def gather(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        raise OSError(errno.EIO, "Input/output error", "/data/7.png")


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_data_that_cannot_be_read_are_told_as_that(workers: int):
    with pytest.raises(TrainingFailedError, match=r"the data cannot be read: .*Input/output error: '/data/7\.png'"):
        list(SequentialLoader(Failing(), batch_size=2, workers=workers))


def test_shuffled_gives_batches_of_one_size_and_no_row_twice():
    loader = shuffled()
    got = rows(loader)
    assert len(loader) == len(got) == 10
    assert {len(batch) for batch in got} == {10}
    seen = flat(got)
    assert len(set(seen)) == 100
    assert seen != sorted(seen)


def test_only_the_rows_of_the_split_are_given():
    indices = torch.tensor([4, 90, 17, 33])
    assert sorted(flat(rows(shuffled(indices=indices, batch_size=2)))) == [4, 17, 33, 90]


def test_transform_sees_the_whole_batch():
    double = shuffled(transform=lambda batch: {"x": batch["x"] * 2})
    assert rows(double) == [[2 * row for row in batch] for batch in rows(shuffled())]


def test_epochs_differ_and_repeat_with_the_seed():
    first, again, other = shuffled(), shuffled(), shuffled(seed=6)
    epochs = [rows(first), rows(first)]
    assert epochs[0] != epochs[1]
    assert [rows(again), rows(again)] == epochs
    assert rows(other) not in epochs  # also not an epoch later, as seed + epoch would give


@pytest.mark.parametrize("micro", [4, 16, 32])
def test_accumulated_micro_batches_are_the_samples_of_the_large_batch(micro):
    large = rows(ShuffledLoader(ROWS, batch_size=32, seed=1))
    small = rows(ShuffledLoader(ROWS, batch_size=micro, seed=1, accumulate=32 // micro))
    assert len(small) % (32 // micro) == 0
    assert flat(small) == flat(large)


def test_random_state_is_neither_read_nor_moved():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    got = rows(shuffled())
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert rows(shuffled()) == got


@pytest.mark.parametrize("stop", [0, 1, 6, 9])
def test_position_inside_an_epoch_survives(stop):
    whole = shuffled()
    expected = rows(whole) + rows(whole) + rows(whole)
    stopped = shuffled()
    rows(stopped)
    passing = iter(stopped)
    got = [next(passing)["x"].tolist() for _ in range(stop)]
    resumed = shuffled()
    resumed.load_state_dict(stopped.state_dict())
    assert expected[10:] == got + rows(resumed) + rows(resumed)


def test_finished_epoch_goes_on_with_the_next_one():
    loader = shuffled()
    state = loader.state_dict() | {"position": 10}
    loader.load_state_dict(state)
    whole = shuffled()
    rows(whole)
    assert rows(loader) == rows(whole)


def test_look_at_a_batch_leaves_a_pass_alone():
    loader, expected = shuffled(), rows(shuffled())
    passing = iter(loader)
    got = rows([next(passing), next(passing)])
    next(iter(loader))
    assert loader.state_dict()["position"] == 2
    assert got + rows(passing) == expected


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seed": 6}, "seed was 6, is 5"),
        ({"batch_size": 20, "accumulate": 2}, "batch_size was 20, is 10; accumulate was 2, is 1"),
        ({"num_samples": 100}, "num_samples was 100, is 103"),
    ],
)
def test_state_of_other_settings_is_refused(change, text):
    loader = shuffled()
    with pytest.raises(CheckpointError, match=text):
        loader.load_state_dict(loader.state_dict() | change)


def test_foreign_state_is_refused():
    with pytest.raises(CheckpointError, match="lacks batch_size, epoch, num_samples"):
        shuffled().load_state_dict({"accumulate": 1, "position": 3, "seed": 5})


def test_a_step_of_more_samples_than_there_are_is_refused():
    with pytest.raises(BadInputError, match=r"a step of 128 samples does not fit the 103 training .*at most 103"):
        shuffled(batch_size=64, accumulate=2)
