"""The identity of data: equal for the same content and settings, wherever it lies; another for any that counts."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from baoc.data import build_data
from baoc.frontier.comparable_runs import group_by_workload
from baoc.frontier.runs import find_runs
from baoc.tracking.files import write_json
from tests.support.values import make_result


def sha(name: str, *, task: str = "vision", **options) -> str:
    return build_data(name, task=task, batch_size=8, **options).identity


@pytest.fixture
def own(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "mine.npz", images=rng.random((60, 8, 8)), labels=np.arange(60) % 3)
    return tmp_path / "mine.npz"


def test_own_images_are_not_the_digits_that_they_replace(own: Path):
    assert sha("digits") == sha("digits") != sha("digits", path=str(own))


def test_the_place_and_the_order_of_batches_do_not_count(own: Path, tmp_path: Path):
    (tmp_path / "moved").mkdir()
    moved = shutil.copy(own, tmp_path / "moved" / "other.npz")
    assert sha("images", path=str(own)) == sha("images", path=str(moved), augment="flip")


def test_settings_that_say_what_is_judged_count(own: Path):
    ids = {sha("images", path=str(own), **options) for options in ({}, {"val_fraction": 0.3}, {"split_seed": 1})}
    assert len(ids) == 3


def test_one_changed_pixel_counts(own: Path, tmp_path: Path):
    with np.load(own) as held:
        images, labels = held["images"].copy(), held["labels"]
    images[3, 0, 0] += 0.25
    np.savez(tmp_path / "changed.npz", images=images, labels=labels)
    assert sha("images", path=str(own)) != sha("images", path=str(tmp_path / "changed.npz"))


def test_folders_of_images_are_told_apart_by_content(tmp_path: Path):
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(12):
        folder = tmp_path / "set" / ("a" if number % 2 else "b")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (9, 9, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    before = sha("images", path=str(tmp_path / "set"))
    assert sha("images", path=str(tmp_path / "set"), workers=0) == before
    Image.new("RGB", (9, 9), (1, 2, 3)).save(tmp_path / "set" / "a" / "1.png")
    assert sha("images", path=str(tmp_path / "set")) != before


def test_text_counts_with_its_tokens(tmp_path: Path):
    (tmp_path / "a.txt").write_text("to be or not to be\n" * 100)
    (tmp_path / "b.txt").write_text("to be or not to Be\n" * 100)
    ids = [
        sha("text", task="language", path=str(tmp_path / file), sequence_length=length)
        for file, length in (("a.txt", 16), ("b.txt", 16), ("a.txt", 8), ("a.txt", 16))
    ]
    assert ids[0] == ids[3] and len(set(ids)) == 3


def test_a_frontier_keeps_different_data_apart_and_shows_the_hash_where_names_are_equal(tmp_path: Path):
    for name, sha256 in (("0", "a" * 64), ("1", "b" * 64), ("2", "a" * 64)):
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "result.json", make_result(dataset="digits", data_sha256=sha256))
    groups = group_by_workload(find_runs(tmp_path))
    assert [(workload[2], len(runs)) for workload, runs in groups] == [("digits@aaaaaaaa", 2), ("digits@bbbbbbbb", 1)]
    shutil.rmtree(tmp_path / "1")
    assert [workload[2] for workload, _ in group_by_workload(find_runs(tmp_path))] == ["digits"]
