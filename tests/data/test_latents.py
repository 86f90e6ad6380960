"""Latents from files: what is read, how it is scaled and split, and the message for each file that is wrong."""

import numpy as np
import pytest
import torch

from baoc.data import build_data
from baoc.data.latents import read_latents
from baoc.errors import BadInputError

RNG = np.random.default_rng(0)
LATENTS = (5 * RNG.standard_normal((40, 4, 6, 6))).astype(np.float16)
LABELS = np.arange(40) % 7


def write(folder, *, name="mine", latents=LATENTS, labels=None, labels_name=None):
    np.save(folder / f"{name}.npy", latents)
    if labels is not None:
        np.save(folder / (labels_name or f"{name}.labels.npy"), labels)
    return folder / f"{name}.npy"


def latents(path, **settings):
    return build_data("latents", task="diffusion", path=str(path), **{"batch_size": 4, **settings})


def test_batches_have_deviation_1_and_labels(tmp_path):
    data = latents(write(tmp_path, labels=LABELS), batch_size=36, val_fraction=0.1)
    spec = data.spec
    assert (spec.dataset, spec.image_size, spec.channels, spec.num_classes) == ("mine", 6, 4, 7)
    assert (spec.num_train, spec.num_val) == (36, 4)
    batch = next(iter(data.train_dataloader()))
    assert batch["images"].dtype is torch.float32 and batch["images"].shape == (36, 4, 6, 6)
    assert batch["images"].std(correction=0) == pytest.approx(1.0, abs=1e-3)
    assert data.scale == pytest.approx(0.2, abs=0.01)
    for image, label in zip(batch["images"] / data.scale, batch["labels"], strict=True):
        row = np.abs(LATENTS - image.numpy()).sum((1, 2, 3)).argmin()
        assert LABELS[row] == label


def test_scale_of_the_user_is_kept_and_the_split_is_the_same_for_every_seed(tmp_path):
    path = write(tmp_path, labels=LABELS)
    one, other = (latents(path, seed=seed, scale=0.18215) for seed in (0, 1))
    assert one.scale == 0.18215
    for a, b in zip(one.val_dataloader(), other.val_dataloader(), strict=True):
        assert torch.equal(a["images"], b["images"])
    assert not torch.equal(next(iter(one.train_dataloader()))["images"], next(iter(other.train_dataloader()))["images"])


def test_folder_is_its_files_one_after_another(tmp_path):
    for name, rows in (("10", slice(30, 40)), ("2", slice(0, 30))):
        write(tmp_path, name=name, latents=LATENTS[rows], labels=LABELS[rows])
    rows = read_latents(tmp_path)
    assert len(rows) == 40
    order = torch.tensor([39, 0, 30, 29, 5, 5])
    batch = rows.gather(order)
    assert np.array_equal(batch["images"].numpy(), LATENTS[order.numpy()])
    assert batch["labels"].tolist() == LABELS[order.numpy()].tolist()


def test_one_labels_file_serves_one_file_and_none_is_one_class(tmp_path):
    assert read_latents(write(tmp_path, labels=LABELS[:, None], labels_name="labels.npy")).num_classes == 7
    (tmp_path / "labels.npy").unlink()
    rows = read_latents(tmp_path / "mine.npy")
    assert rows.num_classes == 1 and not rows.labels.any()


def test_files_are_mapped_and_never_changed(tmp_path):
    path = write(tmp_path, labels=LABELS)
    before = path.read_bytes()
    assert isinstance(np.load(path, mmap_mode="c"), np.memmap)
    read_latents(path).files[0].zero_()
    assert path.read_bytes() == before


def test_random_latents_are_noise_of_the_usual_shape():
    data = build_data("random_latents", task="diffusion", batch_size=8, num_samples=64, num_classes=5)
    batch = next(iter(data.train_dataloader()))
    assert batch["images"].shape == (8, 4, 32, 32)
    assert batch["images"].std() == pytest.approx(1.0, abs=0.02)
    assert (data.spec.num_classes, data.spec.num_train, data.spec.num_val) == (5, 61, 3)
    assert data.scale == 1.0


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"latents": LATENTS[0]}, r"mine.npy has shape \(4, 6, 6\); latents must be \(N, C, S, S\)"),
        ({"latents": LATENTS[:0]}, r"mine.npy has shape \(0, 4, 6, 6\)"),
        ({"latents": LATENTS[..., :5]}, r"mine.npy has shape \(40, 4, 6, 5\); latents must be square"),
        ({"latents": LATENTS.astype(np.int64)}, "mine.npy has dtype int64; latents must be floating-point numbers"),
        ({"latents": LATENTS[:1]}, "mine.npy holds 1 latent: validation holds some out, so at least 2 are needed"),
        ({"labels": LABELS[:-1]}, r"mine.labels.npy holds labels of shape \(39,\); .*mine.npy holds 40 latents"),
        ({"labels": LABELS - 1}, "mine.labels.npy must be integers from 0 on, one for each latent of .*mine.npy"),
        ({"labels": LABELS / 2}, "mine.labels.npy must be integers from 0 on"),
    ],
)
def test_wrong_arrays_are_named(tmp_path, arrays, text):
    with pytest.raises(BadInputError, match=text):
        read_latents(write(tmp_path, **arrays))


def test_wrong_paths_are_named(tmp_path):
    with pytest.raises(BadInputError, match=r"dataset.path=.*/gone.npy does not exist: dataset.path takes a FILE.npy"):
        read_latents(tmp_path / "gone.npy")
    with pytest.raises(BadInputError, match=r"holds no .npy file"):
        read_latents(tmp_path)
    (tmp_path / "a.zip").touch()
    with pytest.raises(BadInputError, match=r"a.zip is no .npy file"):
        read_latents(tmp_path / "a.zip")
    (tmp_path / "b.npy").write_bytes(b"nothing")
    with pytest.raises(BadInputError, match=r"b.npy cannot be read as .npy"):
        read_latents(tmp_path / "b.npy")


def test_shapes_of_a_folder_must_agree(tmp_path):
    write(tmp_path, name="a")
    write(tmp_path, name="b", latents=LATENTS[:, :3])
    with pytest.raises(BadInputError, match=r"b.npy have shape \(3, 6, 6\) each, those of .*a.npy \(4, 6, 6\)"):
        read_latents(tmp_path)


def test_latents_are_never_resized(tmp_path):
    data = latents(write(tmp_path))
    data.resize_to(6)
    with pytest.raises(
        BadInputError, match=r"latents of 6 x 6 do not fit a model that takes 8 x 8: choose a model.size"
    ):
        data.resize_to(8)


def test_impossible_settings_constant_latents_and_a_path_for_noise_are_refused(tmp_path):
    with pytest.raises(BadInputError, match=r"dataset.scale must be above 0, or null"):
        latents(write(tmp_path), scale=0.0)
    with pytest.raises(BadInputError, match=r"the latents of mine have deviation 0.0: they are all one number"):
        latents(write(tmp_path, latents=0 * LATENTS))
    with pytest.raises(BadInputError, match=r"dataset random_latents is generated and reads no dataset.path=x: leave"):
        build_data("random_latents", task="diffusion", batch_size=8, path="x")
    with pytest.raises(BadInputError, match=r"dataset.num_samples=1 and dataset.num_classes=1000: give 2 or more"):
        build_data("random_latents", task="diffusion", batch_size=8, num_samples=1)
