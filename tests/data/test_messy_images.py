"""Images as people have them: wide pixels, transparency, mixed sets, stray files, parts, paths in tables, labels."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from baoc.data import build_data
from baoc.data.decode import open_image
from baoc.data.splits import is_hidden, split_in_name, split_in_path
from baoc.data.tables import parquet_files, training_table, validation_table
from baoc.errors import BadInputError, BaocError
from tests.support.images import encoded, picture, write_folder, write_parquet

SIXTEEN = np.array([[0, 257, 32896], [65535, 400, 60000], [5, 1000, 30000]], dtype=np.uint16)
EIGHT = [[0, 1, 128], [255, 2, 233], [0, 4, 117]]


def images(path: Path, **options: Any) -> Any:
    return build_data("images", task="vision", batch_size=4, path=str(path), workers=0, **options)


def pixels(path: Path) -> list[Any]:
    return np.asarray(open_image(path, where=path.name)).tolist()


class TestBitsPerPixel:
    @pytest.mark.parametrize(("ending", "kind"), [("png", np.uint16), ("tif", np.uint16), ("tif", np.int32)])
    def test_sixteen_become_eight(self, tmp_path: Path, ending: str, kind: Any) -> None:
        path = tmp_path / f"x.{ending}"
        Image.fromarray(SIXTEEN.astype(kind)).save(path)
        assert pixels(path) == EIGHT

    @pytest.mark.parametrize(
        "values", [SIXTEEN.astype(np.float32), SIXTEEN.astype(np.int32) * 1000, -SIXTEEN.astype(np.int32)]
    )
    def test_of_others_nobody_knows_what_is_white(self, tmp_path: Path, values: Any) -> None:
        Image.fromarray(values).save(tmp_path / "x.tif")
        with pytest.raises(BadInputError, match=r"x\.tif has pixels of 32 bits \(mode [IF]\), from .*8 or 16 bits"):
            pixels(tmp_path / "x.tif")

    def test_a_set_of_them_has_all_its_levels(self, tmp_path: Path) -> None:
        for place, name in enumerate(("a", "b")):
            (tmp_path / name).mkdir()
            for number in range(4):
                values = np.full((8, 8), 20000 * (place + 1) + number, dtype=np.uint16)
                Image.fromarray(values).save(tmp_path / name / f"{number}.png")
        data = images(tmp_path)
        assert data.spec.channels == 1
        held = torch.cat([batch["images"] for batch in data.val_dataloader()])
        assert float(held.max() - held.min()) > 1

    @pytest.mark.parametrize("task", ["vision", "diffusion"])
    @pytest.mark.parametrize("channels", [1, 3])
    def test_data_without_variance_are_told(
        self, tmp_path: Path, task: str, channels: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = tmp_path / "x.npz"
        np.savez(file, images=np.full((6, 4, 4, channels), 255, np.uint8), labels=np.arange(6) % 2)
        build_data("images", task=task, batch_size=2, path=str(file))
        assert "every pixel that was read is 255 in all channels: nothing can be learned from that" in caplog.text

    def test_so_is_a_channel_of_one_value(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        values = np.random.default_rng(0).integers(0, 255, (6, 4, 4, 3), dtype=np.uint8)
        values[..., 1] = 7
        np.savez(tmp_path / "x.npz", images=values, labels=np.arange(6) % 2)
        images(tmp_path / "x.npz")
        assert "every pixel that was read is 7 in channel 1 of 3" in caplog.text


class TestTransparency:
    def drawn(self, mode: str) -> Image.Image:
        """Black everywhere; the left half is opaque and the right half is not."""
        opacity = np.zeros((4, 4), np.uint8)
        opacity[:, :2] = 255
        if mode in ("RGBA", "LA"):
            bands = [np.zeros((4, 4), np.uint8)] * (3 if mode == "RGBA" else 1)
            return Image.merge(mode, [Image.fromarray(band) for band in (*bands, opacity)])
        image = Image.fromarray((opacity == 0).astype(np.uint8)).convert("P" if mode == "P" else "L")
        if mode == "P":
            image.putpalette([0, 0, 0, 0, 0, 0])
        return image

    @pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L"])
    def test_what_is_transparent_is_white(self, tmp_path: Path, mode: str) -> None:
        path = tmp_path / "x.png"
        extra = {"transparency": 1} if mode in ("P", "L") else {}
        self.drawn(mode).save(path, **extra)
        found = np.asarray(open_image(path, where="x").convert("L"))
        assert (found[:, :2] <= 1).all() and (found[:, 2:] == 255).all()

    def test_half_of_it_is_half(self, tmp_path: Path) -> None:
        Image.new("RGBA", (2, 2), (0, 0, 0, 51)).save(tmp_path / "x.png")
        assert pixels(tmp_path / "x.png")[0][0] == [204, 204, 204]


class TestMixedSets:
    @pytest.mark.parametrize("grey", ["00.png", "07.png"])
    def test_one_grey_image_makes_no_grey_set(
        self, tmp_path: Path, grey: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        write_folder(tmp_path, size=(16, 16))
        picture(size=(16, 16), mode="L").save(tmp_path / "cat" / grey)
        data = images(tmp_path)
        assert data.spec.channels == 3
        assert "of 24 images 1 are grey and 23 in colour: all are read in colour" in caplog.text

    def test_a_set_of_grey_ones_is_grey_and_needs_no_word(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert images(write_folder(tmp_path, mode="L", size=(16, 16))).spec.channels == 1
        assert not caplog.text

    @pytest.mark.parametrize("odd", [4, 90])
    def test_the_size_is_not_the_first_ones(self, tmp_path: Path, odd: int, caplog: pytest.LogCaptureFixture) -> None:
        write_folder(tmp_path, size=(16, 16))
        picture(size=(odd, odd)).save(tmp_path / "cat" / "00.png")
        assert images(tmp_path).spec.image_size == 16
        assert f"the shorter sides have {min(odd, 16)} to {max(odd, 16)} pixels: all become 16 x 16" in caplog.text


@pytest.mark.parametrize("ending", ["gif", "webp", "tif", "png"])
def test_of_several_frames_the_first_is_read_and_said(
    tmp_path: Path, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_folder(tmp_path, size=(8, 8))
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "green")]
    frames[0].save(tmp_path / "cat" / f"moves.{ending}", save_all=True, append_images=frames[1:])
    images(tmp_path)
    assert "of 25 images 1 have several frames or pages: the first is read" in caplog.text
    first = open_image(tmp_path / "cat" / f"moves.{ending}", where="").convert("RGB").getpixel((0, 0))
    assert first[0] > 200 > 50 > first[1], "red"


@pytest.mark.parametrize("ending", [".JPG", ".Jfif", ".jpe", ".avif", ".TIFF"])
def test_endings_of_images_count_in_any_case(tmp_path: Path, ending: str) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(2):
            kind = {".Jfif": "jpeg", ".jpe": "jpeg"}.get(ending)
            picture().save(tmp_path / name / f"{number}{ending}", kind)
    assert images(tmp_path).spec.num_train == 3


def test_endings_of_arrays_and_tables_count_in_any_case(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with (tmp_path / "x.NPZ").open("wb") as stream:
        np.savez(stream, images=rng.integers(0, 255, (6, 8, 8), dtype=np.uint8), labels=np.arange(6) % 2)
    with (tmp_path / "x.NPY").open("wb") as stream:
        np.save(stream, rng.normal(size=(6, 4, 8, 8)).astype(np.float16))
    rows = [{"image": {"bytes": encoded(picture()), "path": None}, "label": label % 2} for label in range(6)]
    write_parquet(tmp_path / "tables" / "x.PARQUET", rows=rows)
    (tmp_path / "tables" / "old.parquet").mkdir()
    for path in (tmp_path / "x.NPZ", tmp_path / "tables", tmp_path / "tables" / "x.PARQUET"):
        assert images(path).spec.num_classes == 2
    for path in (tmp_path, tmp_path / "x.NPY"):
        assert build_data("latents", task="diffusion", batch_size=2, path=str(path)).spec.num_train == 5


def test_classes_of_which_all_images_are_held_out_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_folder(tmp_path, classes=("a", "b"), count=1)
    build_data("images", task="vision", batch_size=1, path=str(tmp_path))
    assert "1 of 2 classes have no training image, as all of theirs are held out" in caplog.text


def test_validation_images_without_classes_are_refused(tmp_path: Path) -> None:
    """Beside two classes of training images; each of them would be of the first."""
    write_folder(tmp_path / "train", size=(8, 8))
    (tmp_path / "val").mkdir()
    picture(size=(8, 8)).save(tmp_path / "val" / "0.png")
    with pytest.raises(BadInputError, match="val has no folders of classes, which the training images have: cat"):
        images(tmp_path)


class TestStrayFiles:
    def test_they_are_left_out_and_counted(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        write_folder(tmp_path, size=(16, 16))
        shares = (tmp_path / name for name in ("@eaDir", "#recycle", "$RECYCLE.BIN", "lost+found"))
        for folder in (tmp_path / "cat" / ".ipynb_checkpoints", tmp_path / "__MACOSX", tmp_path / ".git", *shares):
            folder.mkdir()
            picture().save(folder / "01-checkpoint.png")
        (tmp_path / "cat" / "._1.png").write_bytes(b"\0\5\26\7")
        (tmp_path / "dog" / "Thumbs.db").write_bytes(b"x")
        (tmp_path / "dog" / "phone.HEIC").write_bytes(b"x")
        (tmp_path / "dog" / "gone.png").symlink_to(tmp_path / "nowhere.png")
        data = images(tmp_path)
        assert data.spec.num_train + data.spec.num_val == 24 and data.spec.num_classes == 2
        told = "5 hidden files, files that are no images (endings .db, .heic) and links to nothing are left out"
        assert told in caplog.text

    def test_what_may_not_have_been_meant_is_said(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Images of no class, classes in classes, and two that differ by case alone."""
        write_folder(tmp_path, size=(8, 8))
        for name in ("stray.png", "Cat/0.png", "dog/big/0.png", "dog/small/0.png"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            picture(size=(8, 8)).save(tmp_path / name)
        assert images(tmp_path).spec.num_classes == 3
        assert "1 images beside the folders of classes are of no class and left out" in caplog.text
        assert f"{tmp_path / 'dog'}: images of 2 folders below it (big, ...) are one class" in caplog.text
        assert "Cat and cat are two classes, by case alone" in caplog.text

    def test_of_tables_texts_and_latents_too(self, tmp_path: Path) -> None:
        rows = [{"image": {"bytes": encoded(picture(size=(8, 8))), "path": None}, "label": n % 2} for n in range(6)]
        write_parquet(tmp_path / "tables" / "a.parquet", rows=rows)
        for name in ("._a.parquet", ".ipynb_checkpoints/a.parquet", "__MACOSX/a.parquet"):
            (tmp_path / "tables" / name).parent.mkdir(exist_ok=True)
            (tmp_path / "tables" / name).write_bytes(b"x")
        data = images(tmp_path / "tables")
        assert data.spec.num_train + data.spec.num_val == 6
        (tmp_path / "text").mkdir()
        (tmp_path / "text" / "a.txt").write_text("abc " * 500)
        (tmp_path / "text" / "__MACOSX").mkdir()
        (tmp_path / "text" / "__MACOSX" / "a.txt").write_bytes(b"\xff\xfe")
        build_data("text", task="language", batch_size=2, path=str(tmp_path / "text"), sequence_length=16)
        (tmp_path / "latents").mkdir()
        np.save(tmp_path / "latents" / "a.npy", np.random.default_rng(0).normal(size=(8, 4, 8, 8)).astype(np.float16))
        (tmp_path / "latents" / "._a.npy").write_bytes(b"x")
        build_data("latents", task="diffusion", batch_size=2, path=str(tmp_path / "latents"))

    @pytest.mark.parametrize("path", ["a/.b.png", ".a/b.png", "x/__macosx/b"])
    def test_what_is_hidden(self, path: str) -> None:
        assert is_hidden(Path(path)) and not is_hidden(Path("a.b/c"))


class TestParts:
    @pytest.mark.parametrize(
        ("name", "role"),
        [
            ("train-00000-of-00002.parquet", "train"), ("validation-0.parquet", "validation"), ("test.parquet", "test"),
            ("val_images", "validation"), ("dev", "validation"), ("latest.parquet", None), ("testimony-0", None),
            ("valley.parquet", None), ("Training", "train"), ("contest/0.parquet", None), ("strain.parquet", None),
        ],
    )  # fmt: skip
    def test_they_are_told_by_whole_words(self, name: str, role: str | None) -> None:
        assert split_in_name(name) == role

    def test_the_innermost_name_counts(self) -> None:
        assert split_in_path(Path("test_project/train-0.parquet")) == "train"
        assert split_in_path(Path("validation/part-0.parquet")) == "validation"
        assert split_in_path(Path("x/part-0.parquet")) == "train"

    def test_validation_comes_before_tests_by_path_and_by_hub(self, tmp_path: Path) -> None:
        for name in ("train-0", "validation-0", "test-0"):
            write_parquet(tmp_path / f"{name}.parquet", rows=[{"x": 1}])
        parts = parquet_files(tmp_path)
        assert {part: [Path(file).name for file in files] for part, files in parts.items()} == {
            part: [f"{part}-0.parquet"] for part in ("train", "validation", "test")
        }
        assert validation_table(parts) == parts["validation"]
        hub = {"test": 1, "train": 2, "validation_matched": 3, "validation": 4}
        assert (training_table(hub, name="a set"), validation_table(hub)) == (2, 4)
        assert validation_table({"train": 2, "test": 1}) == 1
        assert validation_table({"train": 2, "unsupervised": 1}) is None

    @pytest.mark.parametrize("with_validation", [True, False])
    def test_labels_of_a_test_that_are_kept_back_refuse_nothing(
        self, tmp_path: Path, with_validation: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        def rows(labels: list[int]) -> list[dict[str, Any]]:
            return [{"image": {"bytes": encoded(picture(size=(8, 8))), "path": None}, "label": n} for n in labels]

        write_parquet(tmp_path / "train-0.parquet", rows=rows([0, 1] * 5))
        write_parquet(tmp_path / "test-0.parquet", rows=rows([-1] * 4))
        if with_validation:
            write_parquet(tmp_path / "validation-0.parquet", rows=rows([1, 1]))
        data = images(tmp_path)
        assert (data.spec.num_train, data.spec.num_val) == ((10, 2) if with_validation else (8, 2))
        assert ("held-back part has no labels" in caplog.text) == (not with_validation)


class TestPathsInTables:
    def rows(self, names: list[str]) -> list[dict[str, Any]]:
        return [{"image": {"bytes": None, "path": name}, "label": place % 2} for place, name in enumerate(names)]

    @pytest.mark.parametrize("streaming", [False, True])
    def test_they_lead_from_the_table(self, tmp_path: Path, streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir("/")
        names = [f"pictures/{number}.png" for number in range(6)]
        (tmp_path / "set" / "pictures").mkdir(parents=True)
        for name in names:
            picture(size=(8, 8)).save(tmp_path / "set" / name)
        write_parquet(tmp_path / "set" / "train.parquet", rows=self.rows(names))
        data = images(tmp_path / "set", streaming=streaming, image_size=8)
        assert next(iter(data.val_dataloader()))["images"].shape[-1] == 8

    @pytest.mark.parametrize("streaming", [False, True])
    def test_where_they_lead_nowhere_the_row_is_named(self, tmp_path: Path, streaming: bool) -> None:
        write_parquet(tmp_path / "x.parquet", rows=self.rows(["gone/1.png", "gone/2.png"]))
        told = (
            rf"{'x.parquet' if streaming else 'row 0 of .*x.parquet'} holds no image but the path gone/1\.png, which is"
        )
        with pytest.raises(BadInputError, match=told):
            images(tmp_path / "x.parquet", streaming=streaming)


LABELS = {
    "one class": ([0] * 6, "every label of .* is 0: there is nothing to tell apart with one class"),
    "one class of many": ([3] * 6, "every label of .* is 3: there is nothing to tell apart"),
    "a million classes": ([5, 7, 1000000] * 2, "label 1000000 of image 2 in .* is out of range: labels count classes"),
    "below zero": ([0, 1, -1] * 2, "label -1 of image 2 in .* is out of range"),
}


@pytest.mark.parametrize("case", LABELS)
@pytest.mark.parametrize("reader", ["npz", "parquet", "stream"])
def test_every_reader_refuses_the_same_labels(tmp_path: Path, case: str, reader: str) -> None:
    labels, told = LABELS[case]
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 255, (len(labels), 8, 8), dtype=np.uint8)
    with pytest.raises(BaocError, match=told):
        if reader == "npz":
            np.savez(tmp_path / "x.npz", images=pixels, labels=np.array(labels))
            images(tmp_path / "x.npz")
        else:
            rows = [
                {"image": {"bytes": encoded(Image.fromarray(values)), "path": None}, "label": label}
                for values, label in zip(pixels, labels, strict=True)
            ]
            write_parquet(tmp_path / "x.parquet", rows=rows)
            images(tmp_path / "x.parquet", streaming=reader == "stream")


@pytest.mark.parametrize("form", ["flat", "one folder", "npz", "parquet"])
def test_one_class_is_enough_where_nothing_is_told_apart(tmp_path: Path, form: str) -> None:
    values = [np.asarray(picture(size=(8, 8))) for _ in range(6)]
    if form == "npz":
        np.savez(path := tmp_path / "x.npz", images=np.stack(values), labels=np.zeros(6, int))
    elif form == "parquet":
        rows = [{"image": {"bytes": encoded(picture(size=(8, 8))), "path": None}, "label": 0} for _ in range(6)]
        write_parquet(path := tmp_path / "x.parquet", rows=rows)
    else:
        (path := tmp_path / "own").mkdir()
        inner = path if form == "flat" else path / "faces"
        inner.mkdir(exist_ok=True)
        for number in range(6):
            picture(size=(8, 8)).save(inner / f"{number}.png")
    data = build_data("images", task="diffusion", batch_size=2, path=str(path))
    assert data.spec.num_classes == 1 and len(next(iter(data.train_dataloader()))["images"]) == 2
    with pytest.raises(BadInputError, match=r"every label of .* is 0: there is nothing to tell apart"):
        images(path)


def test_a_held_back_part_may_be_of_one_class(tmp_path: Path) -> None:
    def rows(labels: list[int]) -> list[dict[str, Any]]:
        return [{"image": {"bytes": encoded(picture(size=(8, 8))), "path": None}, "label": n} for n in labels]

    write_parquet(tmp_path / "train-0.parquet", rows=rows([0, 1, 2]))
    write_parquet(tmp_path / "val-0.parquet", rows=rows([1, 1]))
    assert images(tmp_path).spec.num_classes == 3


@pytest.mark.parametrize("beside", [None, "notes.txt", ".cache/1.png"])
def test_a_training_part_alone_has_the_classes_and_validation_is_held_out_of_it(tmp_path: Path, beside: str | None):
    write_folder(tmp_path / "Train")
    if beside is not None:
        (tmp_path / beside).parent.mkdir(exist_ok=True)
        (tmp_path / beside).write_bytes(b"")
    spec = images(tmp_path).spec
    assert spec.num_classes == 2 and spec.num_val > 0


def test_a_class_called_train_beside_another_is_a_class(tmp_path: Path):
    write_folder(tmp_path, classes=("train/street", "bus/street"))
    assert images(tmp_path).spec.num_classes == 2


@pytest.mark.parametrize("classes", [(".b",), ("a", ".b")])
def test_a_hidden_class_is_named_where_fewer_than_two_are_left(
    tmp_path: Path, classes: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(BadInputError, match="one folder per class"):
        images(write_folder(tmp_path, classes=classes))
    assert "hidden folders are left out, so rename what is a class: .b" in caplog.text


@pytest.mark.parametrize("name", ["labels.csv", "metadata.jsonl", "annotations.JSON"])
def test_a_table_of_labels_beside_images_is_said_to_be_not_read(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_folder(tmp_path, classes=("all",)) / "all"
    (folder / name).write_text("file,label")
    with pytest.raises(BadInputError, match="with one class; a folder of images has one folder per class"):
        images(folder)
    assert f"{name} is not read, as classes are folders: move the images of each into one of its name" in caplog.text
