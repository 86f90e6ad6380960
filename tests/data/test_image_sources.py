"""Images on disk: folders, parquet, IDX files; varied batches that workers do not change; each fault's message."""

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from baoc.data import build_data
from baoc.data.decode import augment_batch, augment_image
from baoc.data.idx import read_idx
from baoc.errors import BadInputError, TrainingFailedError
from tests.support.images import RNG, encoded, idx_bytes, picture, write_folder, write_parquet


def rows_of(count: int, *, labels=(0, 1, 2), **columns) -> list[dict]:
    image, label = columns.get("image", "image"), columns.get("label", "label")
    return [
        {image: {"bytes": encoded(picture(size=(8, 8), level=row)), "path": None}, label: labels[row % len(labels)]}
        for row in range(count)
    ]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """`datasets` keeps what it read; not in the home of whoever runs the tests."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def images(path: Path | None, name="images", **options):
    given = {"batch_size": 4, "workers": 0} | options
    return build_data(name, task="vision", path=None if path is None else str(path), **given)


def batches(loader) -> list[dict[str, torch.Tensor]]:
    return list(loader)


def same(one, other) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a[key], b[key]) for a, b in zip(one, other, strict=True) for key in ("images", "labels")
    )


# -- folders ----------------------------------------------------------------------------------------------------------


def test_a_folder_of_ones_own_is_one_override_away_from_the_digits(tmp_path):
    data = build_data("digits", task="vision", batch_size=2, path=str(write_folder(tmp_path / "mine")))
    spec = data.spec
    assert (spec.dataset, spec.image_size, spec.channels, spec.num_classes) == ("mine", 16, 3, 2)
    assert (spec.num_train, spec.num_val) == (19, 5)


def test_training_and_validation_folders_are_used_as_they_are(tmp_path):
    write_folder(tmp_path / "train", classes=("a", "b", "c"), count=4, mode="L")
    write_folder(tmp_path / "val", classes=("a", "c"), count=2)  # RGB, made grey as the training images are
    data = images(tmp_path)
    assert (data.spec.num_train, data.spec.num_val, data.spec.num_classes, data.spec.channels) == (12, 4, 3, 1)
    held = batches(data.val_dataloader())
    assert torch.cat([batch["labels"] for batch in held]).tolist() == [0, 0, 2, 2]
    assert held[0]["images"].shape == (4, 1, 16, 16)


def test_labels_go_with_their_images(tmp_path):
    data = images(write_folder(tmp_path / "x", count=8))
    for batch in (*data.train_dataloader(), *data.val_dataloader()):
        bright = batch["images"].mean((1, 2, 3)) > 0  # dogs are 100 brighter, and values are standardised
        assert torch.equal(bright.long(), batch["labels"])


def test_a_model_gets_images_of_its_size(tmp_path):
    for augment in ("none", "crop_flip"):
        data = images(write_folder(tmp_path / augment, size=(90, 70), count=4), augment=augment)
        assert data.spec.image_size == 70
        data.resize_to(32)
        assert next(iter(data.train_dataloader()))["images"].shape == (4, 3, 32, 32)
        assert next(iter(data.val_dataloader()))["images"].shape[1:] == (3, 32, 32)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda root: root / "nowhere", r"nowhere does not exist: it must be a folder with one folder per class"),
        (lambda root: root, r"holds no folders and no images: a folder of images has"),
        (
            lambda root: picture().save(root / "1.png") or root,
            r"every label of .* is 0: .* images has one folder per class",
        ),
        (lambda root: (root / "a").mkdir() or root, r"a holds no image \(.*\.bmp .*\): remove the folder"),
        (
            lambda root: ((root / "x.tar").write_text("") and root / "x.tar") or root / "x.tar",
            r"x.tar holds no label",
        ),
    ],
)
def test_each_wrong_folder_is_named(make, text, tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(BadInputError, match=text):
        images(make(tmp_path / "mine"))


def test_a_class_that_training_does_not_have_is_named(tmp_path):
    write_folder(tmp_path / "train", count=2)
    write_folder(tmp_path / "val", classes=("cat", "cow"), count=2)
    with pytest.raises(BadInputError, match="cow is a class that the training images do not have: cat, dog"):
        images(tmp_path)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("augment", ["none", "crop_flip"])
def test_a_corrupt_image_is_named(tmp_path, augment, workers):
    if (augment, workers) == ("none", 1):
        workers = 0  # decoded at once, no worker sees it
    root = write_folder(tmp_path / "x", size=(90, 90), count=4)
    (root / "dog" / "02.png").write_bytes(encoded(picture(size=(90, 90)))[:300])
    with pytest.raises(TrainingFailedError, match=r"dog/02.png cannot be decoded as an image.*replace or remove it"):
        data = images(root, augment=augment, workers=workers)
        batches(data.train_dataloader())
        batches(data.val_dataloader())


def test_a_file_that_is_no_image_is_named_without_addresses(tmp_path):
    root = write_folder(tmp_path / "x", count=4)
    (root / "dog" / "02.png").write_bytes(b"no image")
    with pytest.raises(TrainingFailedError, match=r"dog/02.png .*\(no image format is recognised\): replace"):
        batches(images(root).train_dataloader())


# -- varied batches, workers, ranks -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_workers_change_nothing_and_passes_do_not_disturb_each_other(tmp_path):
    root = write_folder(tmp_path / "x", size=(90, 70), count=10)
    alone, helped = (images(root, augment="crop_flip", workers=workers) for workers in (0, 1))
    random_state = torch.get_rng_state()
    expected = batches(alone.train_dataloader())
    loader = helped.train_dataloader()
    passing = iter(loader)
    got = [next(passing)]
    look = next(iter(loader))  # takes the workers away from the pass, which goes on all the same
    assert same(got + list(passing), expected)
    assert same([look], expected[:1])
    assert torch.equal(torch.get_rng_state(), random_state)
    second = batches(loader)
    assert same(second, batches(alone.train_dataloader()))
    assert not same(second, expected)


@pytest.mark.parametrize("stop", [1, 3])
def test_varied_batches_resume_in_mid_epoch(tmp_path, stop):
    root = write_folder(tmp_path / "x", count=10)
    whole, stopped, resumed = (images(root, augment="crop_flip", batch_size=2).train_dataloader() for _ in range(3))
    expected = batches(whole)
    passing = iter(stopped)
    got = [next(passing) for _ in range(stop)]
    resumed.load_state_dict(stopped.state_dict())
    assert same(got + batches(resumed), expected)


def test_varying_moves_and_mirrors_and_no_more():
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(1, 256, (64, 3, 16, 16), dtype=torch.uint8)
    flipped = augment_batch(pixels, augment="flip", generator=generator)
    mirrored = (flipped == pixels.flip(-1)).flatten(1).all(1)
    assert ((flipped == pixels).flatten(1).all(1) ^ mirrored).all() and 10 < mirrored.sum() < 54
    moved = augment_batch(pixels, augment="crop_flip", generator=generator)
    assert moved.dtype is torch.uint8 and moved.shape == pixels.shape
    assert not torch.equal(moved, pixels)
    assert (moved == 0).flatten(1).float().mean(1).max() <= 1 - (14 / 16) ** 2 + 1e-6  # padding: 2 pixels of 16
    assert augment_batch(pixels, augment="none", generator=generator) is pixels


def test_random_crops_are_parts_of_the_image():
    ramp = Image.fromarray(np.tile(np.arange(200, dtype=np.uint8), (100, 1)))
    crops = [
        np.asarray(augment_image(ramp, size=32, augment="crop_flip", generator=torch.Generator().manual_seed(seed)))
        for seed in range(40)
    ]
    slopes = np.array([crop[16].astype(int)[-1] - crop[16].astype(int)[0] for crop in crops])
    assert 8 < (slopes < 0).sum() < 32, "about half are mirrored"
    assert np.abs(slopes).min() < 60 < 90 < np.abs(slopes).max(), "areas differ"


def test_diffusion_gets_values_between_minus_one_and_one(tmp_path):
    data = build_data("digits", task="diffusion", batch_size=2000, val_fraction=0.5)
    pixels = next(iter(data.val_dataloader()))["images"]
    assert (pixels.min(), pixels.max()) == (-1, 1)


# -- parquet ----------------------------------------------------------------------------------------------------------


def test_parquet_with_the_usual_columns(tmp_path):
    write_parquet(tmp_path / "data" / "train-0.parquet", rows=rows_of(9, image="img", label="fine_label"))
    write_parquet(tmp_path / "data" / "test-0.parquet", rows=rows_of(4, image="img", label="fine_label"))
    data = images(tmp_path / "data")
    spec = data.spec
    assert (spec.num_train, spec.num_val, spec.num_classes, spec.image_size) == (9, 4, 3, 8)
    assert torch.cat([batch["labels"] for batch in data.val_dataloader()]).tolist() == [0, 1, 2, 0]


def test_labels_of_text_are_numbered_alphabetically(tmp_path):
    path = write_parquet(tmp_path / "mine.parquet", rows=rows_of(6, labels=("dog", "cat"), label="animal"))
    data = images(path, label_column="animal", val_fraction=0.5)
    values = [label for loader in (data.val_dataloader(),) for batch in loader for label in batch["labels"].tolist()]
    assert data.spec.num_classes == 2 and set(values) <= {0, 1}


@pytest.mark.parametrize(
    ("rows", "options", "text"),
    [
        (
            rows_of(3, image="photo"),
            {},
            r"has no column image or .*but photo, label: set dataset.image_column=NAME",
        ),
        (rows_of(3), {"label_column": "kind"}, r"dataset.label_column=kind: .* has the columns image, label"),
        (rows_of(3, labels=(0, None)), {}, r"row 1 of .*x.parquet has no label: fill it in"),
        (rows_of(3, labels=(0.5, 1.5)), {}, r"must be text or whole numbers from 0, all alike, not 0.5"),
        (
            [{"image": {"bytes": b"no image", "path": None}, "label": label} for label in (0, 1)],
            {},
            r"row 0 of .* cannot be decoded",
        ),
        (
            [{"image": 5, "label": label} for label in (0, 1)],
            {},
            r"row 0 of .* holds no encoded image: remove it, or name another",
        ),
    ],
)
def test_each_wrong_table_is_named(rows, options, text, tmp_path):
    path = write_parquet(tmp_path / "x.parquet", rows=rows)
    with pytest.raises((BadInputError, TrainingFailedError), match=text):
        images(path, **options)


def test_files_that_are_no_parquet_are_named(tmp_path):
    (tmp_path / "x.parquet").write_text("none")
    with pytest.raises(BadInputError, match=r"x.parquet cannot be read as parquet"):
        images(tmp_path / "x.parquet")
    (tmp_path / "d" / "test").mkdir(parents=True)
    (tmp_path / "d" / "test" / "0.parquet").write_text("none")
    with pytest.raises(BadInputError, match=r"holds no parquet file of training images"):
        images(tmp_path / "d")


def test_a_hub_set_without_a_network_says_what_to_do(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: (_ for _ in ()).throw(ConnectionError("offline")))
    with pytest.raises(BadInputError, match=r"uoft-cs/cifar10 cannot be loaded .*\(offline\): name a copy with"):
        build_data("cifar10", task="vision", batch_size=4)
    with pytest.raises(BadInputError, match=r"dataset=images needs dataset.path=PATH .* or dataset.hub=NAME"):
        build_data("images", task="vision", batch_size=4)


# -- IDX --------------------------------------------------------------------------------------------------------------


def write_idx(root: Path, *, count=30, pack=True, part="train") -> Path:
    pixels, labels = RNG.integers(0, 256, (count, 28, 28)), np.arange(count) % 10
    for name, array in ((f"{part}-images-idx3-ubyte", pixels), (f"{part}-labels-idx1-ubyte", labels)):
        content = idx_bytes(array)
        (root / f"{name}.gz").write_bytes(gzip.compress(content)) if pack else (root / name).write_bytes(content)
    return root


@pytest.mark.parametrize("pack", [True, False])
def test_fashion_mnist_from_its_files(tmp_path, pack):
    data = build_data("fashion_mnist", task="vision", batch_size=4, path=str(write_idx(tmp_path, pack=pack)))
    spec = data.spec
    assert (spec.image_size, spec.channels, spec.num_classes, spec.num_train, spec.num_val) == (28, 1, 10, 28, 2)


def test_fashion_mnist_judged_on_its_test_images(tmp_path):
    write_idx(tmp_path)
    wanted = {"task": "vision", "batch_size": 4, "path": str(tmp_path), "judged_on": "test"}
    with pytest.raises(BadInputError, match=r"holds neither t10k-images-idx3-ubyte.gz nor .* begin with t10k"):
        build_data("fashion_mnist", **wanted)
    write_idx(tmp_path, count=20, part="t10k")
    data = build_data("fashion_mnist", **wanted)
    assert (data.spec.num_train, data.spec.num_val) == (30, 20), "no training image is held out"
    train = torch.cat([batch["images"] for batch in data.make_overfit_loader()])
    held = torch.cat([batch["images"] for batch in data.val_dataloader()])
    assert len(held) == 20
    assert not any(torch.equal(image, other) for image in held for other in train)
    with pytest.raises(BadInputError, match=r"dataset.judged_on=val is not allowed: choose one of train, test"):
        build_data("fashion_mnist", **wanted | {"judged_on": "val"})


def test_broken_idx_files_are_named(tmp_path):
    with pytest.raises(BadInputError, match=r"nowhere is no folder with Fashion-MNIST: on Debian .*apt install"):
        build_data("fashion_mnist", task="vision", batch_size=4, path=str(tmp_path / "nowhere"))
    with pytest.raises(BadInputError, match=r"holds neither train-images-idx3-ubyte.gz nor"):
        build_data("fashion_mnist", task="vision", batch_size=4, path=str(tmp_path))
    write_idx(tmp_path)
    file = tmp_path / "train-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(BadInputError, match=re.escape(f"{file} cannot be read as IDX")):
        build_data("fashion_mnist", task="vision", batch_size=4, path=str(tmp_path))
    short = tmp_path / "short"
    short.write_bytes(idx_bytes(np.zeros((2, 3)))[:-1])
    with pytest.raises(BadInputError, match=r"its header says type 8, shape \(2, 3\), and 5 bytes follow"):
        read_idx(short, dims=2)


def test_synthetic_images_say_that_they_are():
    data = build_data("synthetic_images", task="vision", batch_size=4, num_samples=20, num_classes=5, image_size=12)
    assert (data.spec.dataset, data.spec.image_size, data.spec.num_classes) == ("synthetic_images", 12, 5)
    with pytest.raises(BadInputError, match=r"dataset.num_classes must lie between 2 and num_samples=4, not 10"):
        build_data("synthetic_images", task="vision", batch_size=4, num_samples=4, num_classes=10)
