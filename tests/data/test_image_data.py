"""Images in files: what is read, how it is split and standardised, and the message for each file that is wrong."""

import re

import numpy as np
import pytest
import torch

from baoc.data import build_data
from baoc.data.images import read_digits, read_npz
from baoc.errors import BadInputError

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (40, 6, 6, 3), dtype=np.uint8)
LABELS = np.arange(40) % 4


def write(path, **arrays):
    np.savez(path, **arrays)
    return path


def test_embedded_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    ours, theirs = read_digits(), load_digits()
    assert np.array_equal(ours.images[..., 0], theirs.images)
    assert np.array_equal(ours.labels, theirs.target)
    assert ours.num_classes == 10
    assert ours.images.dtype == np.uint8


def test_split_holds_back_a_fifth_and_is_the_same_for_every_seed():
    one, other = (build_data("digits", task="vision", batch_size=64, seed=seed) for seed in (0, 1))
    spec = one.spec
    assert (spec.image_size, spec.channels, spec.num_classes, spec.num_train, spec.num_val) == (8, 1, 10, 1438, 359)
    val = [torch.cat([batch["labels"] for batch in data.val_dataloader()]) for data in (one, other)]
    assert torch.equal(*val)
    first = [next(iter(data.train_dataloader()))["labels"] for data in (one, other)]
    assert not torch.equal(*first)


def test_split_seed_changes_the_split_and_parts_never_overlap(tmp_path):
    path = write(tmp_path / "ids.npz", images=np.arange(100.0).reshape(100, 1, 1), labels=np.arange(100) % 2)
    parts = []
    for split_seed in (0, 1):
        data = build_data("npz", task="vision", batch_size=1, path=str(path), split_seed=split_seed)
        values = [
            torch.cat([batch["images"] for batch in loader]).flatten() * data.transform.std.item()
            + data.transform.mean.item()
            for loader in (data.train_dataloader(), data.val_dataloader())
        ]
        train, val = (set(part.round().int().tolist()) for part in values)
        assert (len(train), len(val), len(train | val)) == (80, 20, 100)
        parts.append(val)
    assert parts[0] != parts[1]


def test_batches_are_standardised_by_the_training_part(tmp_path):
    path = write(tmp_path / "rgb.npz", images=IMAGES, labels=LABELS)
    data = build_data("npz", task="vision", batch_size=32, path=str(path))
    batch = next(iter(data.train_dataloader()))  # all 32 training images
    assert batch["images"].shape == (32, 3, 6, 6)
    assert batch["images"].dtype == torch.float32
    assert batch["labels"].dtype == torch.int64
    torch.testing.assert_close(batch["images"].mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(batch["images"].std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5, rtol=0)


def test_constant_channel_stays_finite(tmp_path):
    path = write(tmp_path / "flat.npz", images=np.full((40, 6, 6), 7.0), labels=LABELS)
    data = build_data("npz", task="vision", batch_size=32, path=str(path))
    assert torch.equal(next(iter(data.train_dataloader()))["images"], torch.zeros(32, 1, 6, 6))


@pytest.mark.parametrize("size", [4, 12])
def test_images_are_resized_to_what_a_model_asks_for(tmp_path, size):
    path = write(tmp_path / "rgb.npz", images=IMAGES, labels=LABELS)
    data = build_data("npz", task="vision", batch_size=8, path=str(path))
    data.resize_to(size)
    for loader in (data.train_dataloader(), data.val_dataloader()):
        assert next(iter(loader))["images"].shape == (8, 3, size, size)
    assert data.spec.image_size == 6


def test_path_replaces_the_embedded_images(tmp_path):
    path = write(tmp_path / "mine.npz", images=IMAGES, labels=LABELS)
    data = build_data("digits", task="vision", batch_size=8, path=str(path))
    assert (data.spec.dataset, data.spec.num_classes, data.spec.num_train) == ("mine", 4, 32)


WRONG = {
    "no images": ({"labels": LABELS, "pixels": IMAGES}, "lacks the array images; it holds labels, pixels"),
    "empty": ({}, "lacks the array images and labels; it holds nothing"),
    "flat images": ({"images": IMAGES.reshape(40, -1), "labels": LABELS}, r"have shape \(40, 108\); they must be"),
    "no image at all": ({"images": IMAGES[:0], "labels": LABELS[:0]}, r"have shape \(0, 6, 6, 3\)"),
    "channels first": ({"images": IMAGES.transpose(0, 3, 1, 2), "labels": LABELS}, "move the channels to the last"),
    "not square": ({"images": IMAGES[:, :, :5], "labels": LABELS}, "6 x 5 pixels.* crop or pad them"),
    "text": ({"images": np.full((40, 6, 6), "a"), "labels": LABELS}, "dtype <U1; they must be numbers"),
    "objects": ({"images": np.full((40, 6, 6), None), "labels": LABELS}, "cannot be read as .npz .Object arrays"),
    "nan": ({"images": np.where(LABELS == 0, np.nan, 1.0)[:, None, None], "labels": LABELS}, "10 values that are nan"),
    "fewer labels": ({"images": IMAGES, "labels": LABELS[:39]}, r"\(39,\); 40 images need labels of shape \(40,\)"),
    "one-hot labels": ({"images": IMAGES, "labels": np.eye(4)[LABELS]}, r"labels of .* have shape \(40, 4\)"),
    "float labels": ({"images": IMAGES, "labels": LABELS * 1.0}, "dtype float64; they must be integers"),
    "negative label": ({"images": IMAGES, "labels": LABELS - 1}, "label -1 of image 0 in .* is out of range"),
    "huge label": ({"images": IMAGES, "labels": LABELS + 40 * (LABELS == 3)}, "label 43 of image 3 .*out of range"),
}


@pytest.mark.parametrize("case", WRONG)
def test_file_that_cannot_be_used_is_named_with_what_is_wrong(case, tmp_path):
    arrays, text = WRONG[case]
    path = write(tmp_path / "wrong.npz", **arrays)
    with pytest.raises(BadInputError, match=text) as caught:
        read_npz(path)
    assert str(path) in str(caught.value)


DAMAGE = {
    "empty": lambda whole: b"",
    "no archive": lambda whole: b"not a zip file",
    "torn": lambda whole: b"PK\x03\x04 torn",
    "truncated": lambda whole: whole[:-200],
    "flipped": lambda whole: whole[:1000] + bytes([whole[1000] ^ 0xFF]) + whole[1001:],
}


@pytest.mark.parametrize("how", DAMAGE)
def test_file_that_is_no_whole_archive_is_named(how, tmp_path):
    path = write(tmp_path / "mine.npz", images=IMAGES, labels=LABELS)
    path.write_bytes(DAMAGE[how](path.read_bytes()))
    with pytest.raises(BadInputError, match=re.escape(f"{path} cannot be read as .npz")):
        read_npz(path)


def test_paths_that_are_no_file_are_refused(tmp_path):
    with pytest.raises(BadInputError, match=r"dataset.path=.*nothing.npz does not exist: write one with numpy"):
        read_npz(tmp_path / "nothing.npz")
    (tmp_path / "images.csv").write_text("1,2")
    for other in (tmp_path, tmp_path / "images.csv"):
        with pytest.raises(BadInputError, match=rf"dataset.path={other} is not a .npz file"):
            read_npz(other)


@pytest.mark.parametrize("fraction", [0, 1, 1.5])
def test_split_that_leaves_a_part_empty_is_refused(fraction):
    with pytest.raises(BadInputError, match=f"val_fraction must lie between 0 and 1, not {fraction}"):
        build_data("digits", task="vision", batch_size=8, val_fraction=fraction)
