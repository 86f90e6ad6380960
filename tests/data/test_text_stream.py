"""Streams of documents: packing, shuffling, the exact place to go on from, ranks, and what is said when one breaks."""

import io
import sys

import datasets
import numpy as np
import pytest
import torch

from baoc.data import build_data, text_stream
from baoc.data.tables import shard_stream
from baoc.data.text_stream import Documents, PackedStream, StreamDataModule
from baoc.data.tokens import ByteTokenizer
from baoc.errors import BadInputError, TrainingFailedError

LENGTHS = np.random.default_rng(0).integers(1, 60, 400)
ROWS = [{"text": f"<{number:03d}" * int(length)} for number, length in enumerate(LENGTHS)]
CONTENT = "".join(row["text"] for row in ROWS).encode()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream")
    for part in range(4):
        datasets.Dataset.from_list(ROWS[part * 100 : part * 100 + 100]).to_parquet(str(folder / f"{part}.parquet"))
    return [str(folder / f"{part}.parquet") for part in range(4)]


@pytest.fixture
def stream(files):
    return datasets.IterableDataset.from_parquet(files)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(text_stream, "SHUFFLE_BLOCK", 20)
    monkeypatch.setattr(text_stream, "DOCUMENTS_PER_BATCH", 7)


def packed(stream, *, length: int = 50) -> PackedStream:
    return PackedStream(Documents(stream, name="x", column="text"), tokenizer=ByteTokenizer(), length=length)


def module(stream, val=None, **settings) -> StreamDataModule:
    options = {"batch_size": 4, "sequence_length": 50, "max_val_sequences": 8, "seed": 3, **settings}
    return StreamDataModule(stream, val, name="x", **options)


def texts(batches) -> list[bytes]:
    return [bytes(row.tolist()) for batch in batches for row in batch["tokens"]]


@pytest.mark.parametrize("length", [1, 50, 3000])
def test_sequences_follow_each_other_and_hold_the_token_behind(stream, length):
    windows = list(packed(stream, length=length))
    assert len(windows) == (len(CONTENT) - 1) // length
    for number, window in enumerate(windows):
        assert window.tobytes() == CONTENT[number * length : (number + 1) * length + 1]


@pytest.mark.parametrize("length", [50, 3000])
def test_every_place_is_exact(stream, length):
    whole = packed(stream, length=length)
    places, windows = [whole.state_dict()], []
    for window in whole:
        windows.append(window.tobytes())
        places.append(whole.state_dict())
    for at in range(0, len(places), max(1, len(places) // 25)):
        resumed = packed(stream, length=length)
        resumed.load_state_dict(places[at])
        assert [window.tobytes() for window in resumed] == windows[at:], at


def test_training_begins_behind_what_is_held_back(stream):
    built = module(stream)
    held = b"".join(texts(built.val_dataloader()))
    assert held == CONTENT[: 8 * 50]
    trained = texts(built.train_dataloader())
    taken = built.spec
    assert (taken.num_val, taken.num_train, taken.vocab_size, taken.bytes_per_token) == (8, 0, 256, 1.0)
    first = next(n for n in range(0, 400, 7) if sum(4 * LENGTHS[:n]) >= 8 * 50 + 1)
    rest = "".join(row["text"] for row in ROWS[first:]).encode()
    expected = [rest[at : at + 50] for at in range(0, len(rest) - 50, 50)]
    assert len(trained) == len(expected) // 4 * 4
    assert trained != expected[: len(trained)]
    assert set(trained) <= set(expected)


def test_validation_part_of_its_own_leaves_training_whole(files):
    train = datasets.IterableDataset.from_parquet(files[:2])
    val = datasets.IterableDataset.from_parquet(files[2:])
    built = module(train, val)
    assert b"".join(texts(built.val_dataloader())) == "".join(r["text"] for r in ROWS[200:]).encode()[: 8 * 50]
    whole = "".join(row["text"] for row in ROWS[:200]).encode()
    assert sorted(texts(built.train_dataloader()))[0] in whole
    assert len(texts(built.train_dataloader())) == (len(whole) - 1) // 50 // 4 * 4


@pytest.mark.parametrize("stop", [5, 17])
def test_position_survives_in_the_data_module(files, stop):
    def built():
        return module(datasets.IterableDataset.from_parquet(files))

    whole = texts(built().train_dataloader())
    stopped = built()
    passing = iter(stopped.train_dataloader())
    for _ in range(stop):
        next(passing)
    buffer = io.BytesIO()
    torch.save(stopped.state_dict(), buffer)
    buffer.seek(0)
    resumed = built()
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    assert texts(resumed.train_dataloader()) == whole[4 * stop :]


def test_ranks_share_the_stream_without_overlap(stream):
    parts = []
    for rank in range(2):
        documents = Documents(stream, name="x", column="text").for_rank(rank, 2)
        own = PackedStream(documents, tokenizer=ByteTokenizer(), length=50)
        parts.append(b"".join(window[:-1].tobytes() for window in own))
    whole = [row["text"].encode() for row in ROWS if len(row["text"]) > 60]
    counts = [sum(text in part for part in parts) for text in whole]
    assert max(counts) == 1
    assert counts.count(0) <= 2  # cut off at an end
    assert abs(len(parts[0]) - len(parts[1])) < 0.2 * len(CONTENT)


def test_ranks_of_a_stream_in_files_train_on_no_held_out_document():
    """Split by files, each rank would skip its share of 6: three held-out documents would be trained on."""
    stream = datasets.Dataset.from_dict({"at": list(range(40))}).to_iterable_dataset(num_shards=4).skip(6)
    parts = [[row["at"] for row in shard_stream(stream, rank=rank, num_ranks=2, skipped=True)] for rank in range(2)]
    assert not set(parts[0]) & set(parts[1]) and sorted(parts[0] + parts[1]) == list(range(6, 40))


def test_overfitting_repeats_the_first_sequences(stream):
    loader = module(stream).make_overfit_loader()
    assert texts(loader) == texts(loader)
    assert len(texts(loader)) == 20


def test_stream_that_breaks_ends_training_with_a_sentence(stream):
    def broken():
        yield from ({"text": "abc" * 100} for _ in range(30))
        raise ConnectionError("the hub went away")

    built = module(datasets.IterableDataset.from_generator(broken))
    with pytest.raises(TrainingFailedError, match=r"stream of x broke \(.*\): resume=auto goes on from the last"):
        list(built.train_dataloader())


def test_column_that_is_not_there_is_named(stream):
    with pytest.raises(BadInputError, match=r"x has no column 'body' of text; name it with dataset.text_column=text"):
        module(stream, text_column="body")


def test_stream_shorter_than_a_sequence_is_refused(stream):
    with pytest.raises(BadInputError, match="the validation text of x is shorter than one sequence of 9999999"):
        module(stream, sequence_length=9_999_999)


def test_hub_out_of_reach_is_said_at_once(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    message = r"the hub gave no split train of allenai/c4 \(en\): .*\. Check the name and the network, or give dataset"
    with pytest.raises(BadInputError, match=message):
        build_data("c4", task="language", batch_size=4)


def test_a_hub_without_the_package_is_told_by_the_name_of_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        text_stream.build_stream("allenai/c4", hub_config="en", train_split="train", val_split=None)
    assert caught.value.name == "datasets"
