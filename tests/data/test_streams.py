"""Streams: every sample once an epoch, whole steps only, the very next batch after a stop, and images out of them."""

import io
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image

from baoc.data import build_data
from baoc.data.stream import StreamLoader
from baoc.errors import BadInputError, CheckpointError


class Numbers:
    """0 to `count` - 1; stands where it was told to. Stands in for `datasets.IterableDataset`."""

    def __init__(self, count: int):
        self.count, self.at, self.reads = count, 0, 0

    def __iter__(self):
        while self.at < self.count:
            self.at += 1
            self.reads += 1
            yield self.at - 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state_dict):
        self.at = state_dict["at"]


def loader(*, count=107, opened=None, **settings) -> StreamLoader:
    def open_stream(epoch: int) -> Numbers:
        stream = Numbers(count)
        if opened is not None:
            opened.append(stream)
        return stream

    def make(samples, generator):
        return {"x": torch.tensor(samples), "noise": torch.rand(len(samples), generator=generator)}

    return StreamLoader(open_stream, make=make, **{"batch_size": 4, "seed": 3, "buffer": 20, **settings})


def values(batches) -> list[list[float]]:
    return [[*batch["x"].tolist(), *batch["noise"].tolist()] for batch in batches]


def test_an_epoch_gives_each_sample_once_in_whole_steps():
    seen = [row for batch in loader(accumulate=3) for row in batch["x"].tolist()]
    assert len(seen) == len(set(seen)) == 96  # five blocks of 24 (20 rounded up to steps of 12), the last of 11 dropped
    assert seen != sorted(seen)
    assert max(seen[:24]) < 24 <= min(seen[24:48]), "shuffled inside blocks"


def test_epochs_differ_and_repeat_with_the_seed():
    one, again, other = loader(), loader(), loader(seed=4)
    epochs = [values(one), values(one)]
    assert epochs[0] != epochs[1] and [values(again), values(again)] == epochs
    assert values(other) not in epochs


@pytest.mark.parametrize("stop", [0, 4, 5, 14])
def test_a_stop_anywhere_goes_on_with_the_very_next_batch(stop):
    whole = loader()
    expected = values(whole) + values(whole)
    stopped, opened = loader(), []
    got = values(islice(iter(stopped), stop))
    resumed = loader(opened=opened)
    resumed.load_state_dict(stopped.state_dict())
    assert got + values(resumed) + values(resumed) == expected
    assert opened[0].reads <= 107 - max(0, (stop - 5) // 5 * 20), "what came before the block was read again"


def test_resumed_twice():
    expected = values(loader())
    first = loader()
    got = values(islice(iter(first), 7))
    second = loader()
    second.load_state_dict(first.state_dict())
    got += values(islice(iter(second), 7))
    third = loader()
    third.load_state_dict(second.state_dict())
    assert got + values(third) == expected


def test_a_look_does_not_disturb_and_a_new_trainer_epoch_goes_on():
    expected = values(loader())
    stream = loader()
    stream.set_epoch(0)
    passing = iter(stream)
    got = values([next(passing), next(passing)])
    assert values([next(iter(stream))]) == expected[:1]
    assert stream.state_dict()["batch"] == 2
    stream.set_epoch(1)  # Lightning ended its epoch under limit_train_batches
    assert got + values(stream) == expected


def test_positions_of_other_settings_are_refused():
    with pytest.raises(CheckpointError, match="batch_size was 8, is 4; block_size was 24, is 20"):
        loader().load_state_dict(loader(batch_size=8).state_dict())
    with pytest.raises(CheckpointError, match="lacks batch, batch_size, block"):
        loader().load_state_dict({"epoch": 0, "seed": 3})


# -- images -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def write(tmp_path, monkeypatch):
    """`write(names)`: a folder of one parquet file of ten images for each name; at most six are held back."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    from baoc.data import vision_stream

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(vision_stream, "NUM_VAL", 6)

    def write_files(*names: str) -> str:
        (tmp_path / "data").mkdir()
        for part, name in enumerate(names):
            rows = []
            for row in range(10):
                stream = io.BytesIO()
                Image.fromarray(np.full((12, 12, 3), 10 * part + row, np.uint8)).save(stream, "png")
                rows.append({"image": {"bytes": stream.getvalue(), "path": None}, "label": row % 2})
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data" / f"{name}.parquet")
        return str(tmp_path / "data")

    return write_files


def streamed(path: str, **options):
    return build_data("images", task="vision", batch_size=4, path=path, streaming=True, **options)


def test_streamed_images_are_held_back_decoded_and_resumable(write):
    files = write("train-0", "train-1", "train-2")
    data = streamed(files, image_size=8)
    assert (data.spec.image_size, data.spec.num_classes, data.spec.num_val) == (8, 2, 6)
    held = torch.cat([batch["images"] for batch in data.val_dataloader()])
    whole = data.train_dataloader()
    expected = [batch["images"] for batch in whole]
    assert len(expected) == 6 and expected[0].shape == (4, 3, 8, 8)
    means = {round(float(image.mean()), 4) for batch in expected for image in batch}
    assert len(means) == 24 and not means & {round(float(image.mean()), 4) for image in held}
    stopped, resumed = (streamed(files, image_size=8).train_dataloader() for _ in range(2))
    got = [batch["images"] for batch in islice(iter(stopped), 2)]
    resumed.load_state_dict(stopped.state_dict())
    got += [batch["images"] for batch in resumed]
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    data.resize_to(16)
    assert next(iter(data.val_dataloader()))["images"].shape[-1] == 16


def test_files_come_in_an_order_of_each_epoch_and_a_stop_loses_nothing(write):
    files = write("train-0", "train-1", "train-2", "test-0")
    settings = {"image_size": 8, "seed": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baoc.data.vision_stream.SHUFFLE_BLOCK", 4)  # blocks of one batch, so that files do not mix
        whole = streamed(files, **settings).train_dataloader()
        epochs = [[batch["images"] for batch in whole] for _ in range(2)]
        for stop in (1, 3, 6):
            stopped, resumed = (streamed(files, **settings).train_dataloader() for _ in range(2))
            got = [batch["images"] for batch in islice(iter(stopped), stop)]
            resumed.load_state_dict(stopped.state_dict())
            got += [batch["images"] for batch in resumed]
            assert all(torch.equal(one, other) for one, other in zip(got, epochs[0], strict=True))
    values = [[round(float(image.mean()), 4) for batch in epoch for image in batch] for epoch in epochs]
    assert [len(set(epoch)) for epoch in values] == [28, 28], "30 training images in steps of 4"
    assert values[0] != values[1] and values[0] != sorted(values[0])


@pytest.mark.parametrize("names", [("train-0", "train-1"), ("train-0", "train-1", "test-0")])
def test_ranks_share_a_stream_of_images(write, names, monkeypatch):
    data = streamed(write(*names), image_size=8)
    seen = []
    for rank in (0, 1):
        monkeypatch.setattr("baoc.data.vision_stream.rank_and_size", lambda _, rank=rank: (rank, 2))
        batches = list(data.make_train_loader(limit=None))
        seen.append({round(float(image.mean()), 4) for batch in batches for image in batch["images"]})
    assert seen[0] and seen[1] and not seen[0] & seen[1]


def test_threads_of_a_stream_are_as_many_as_workers_were_asked_for(write, monkeypatch):
    from baoc.data import vision_stream

    path = write("train-0")
    monkeypatch.setattr(vision_stream, "StreamLoader", lambda *_, threads, **__: threads)
    assert [streamed(path, workers=asked).make_train_loader(limit=None) for asked in (None, 0, 1, 3)] == [4, 1, 1, 3]
    with pytest.raises(BadInputError, match=r"dataset\.workers must be 0 \(none\) or more, not -1"):
        streamed(path, workers=-1)


@pytest.mark.parametrize("option", [{"val_fraction": 0.1}, {"split_seed": 1}])
def test_settings_of_a_split_that_a_stream_does_not_make_are_refused(write, option: dict[str, float]):
    path, ((key, value),) = write("train-0"), option.items()
    with pytest.raises(
        BadInputError, match=rf"dataset\.{key}={value} has no effect on images as a stream.*leave it out"
    ):
        streamed(path, **option)
    assert streamed(path, val_fraction=0.2, split_seed=0).spec.num_val, "the defaults, as conf/ has them"


def test_a_folder_of_images_is_not_streamed(tmp_path):
    with pytest.raises(BadInputError, match=r"dataset.streaming reads parquet and hub sets; .* is none: set dataset"):
        streamed(str(tmp_path))
