"""Text in files: what is read, where it is split, how it is packed, and the message for each file that is wrong."""

import gzip
import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset

from baoc.data import build_data, text_files, token_arrays
from baoc.data.python_library import read_python_library
from baoc.data.text_files import TextChunk, TextFiles, byte_range, find_text, hash_text
from baoc.errors import BadInputError

STORY = "Zoë läuft über die Straße. 雨が降る。\n" * 60  # 2 to 3 bytes in many characters


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("BAOC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def data(path, **options):
    settings = {"batch_size": 4, "sequence_length": 16, **options}
    return build_data("text", task="language", path=str(path), **settings)


def story(tmp_path, text: str = STORY) -> Path:
    path = tmp_path / "story.txt"
    path.write_text(text, encoding="utf-8")
    return path


def joined(chunks) -> bytes:
    return b"".join(chunk.text for chunk in chunks)


def read(loader) -> torch.Tensor:
    return torch.cat([torch.cat([batch["tokens"], batch["targets"][:, -1:]], 1) for batch in loader])


# -- the embedded set -------------------------------------------------------------------------------------------------


def test_embedded_set_is_bytes_with_the_end_held_back():
    built = build_data("pysource", task="language", batch_size=16)
    content = read_python_library()
    spec = built.spec
    assert (spec.dataset, spec.vocab_size, spec.sequence_length, spec.bytes_per_token) == ("pysource", 256, 128, 1.0)
    assert spec.sha256 == hashlib.sha256(content).hexdigest()
    held = round(0.05 * len(content))
    assert spec.num_train == (len(content) - held - 1) // 128
    assert spec.num_val == 512
    first, last = (bytes(batch["tokens"][at].tolist()) for batch, at in _ends(built.val_dataloader()))
    assert content.index(first, len(content) - held - 4) >= len(content) - held
    assert last in content[-held // 50 :]


def _ends(loader):
    batches = list(loader)
    return (batches[0], 0), (batches[-1], -1)


# -- splitting and packing --------------------------------------------------------------------------------------------


def test_split_never_cuts_a_character_and_loses_no_byte():
    chunks = [
        TextChunk(text="äöü".encode(), ends=False),
        TextChunk(text="ßx".encode(), ends=True),
        TextChunk(text=b"z", ends=True),
    ]
    whole = joined(chunks)
    for cut in range(len(whole) + 1):
        first, second = list(byte_range(chunks, end=cut)), list(byte_range(chunks, start=cut))
        assert joined(first) + joined(second) == whole
        joined(first).decode()
        joined(second).decode()
        assert cut <= len(joined(first)) <= cut + 1
        assert sum(chunk.ends for chunk in first + second) == 2


def test_pieces_of_a_long_line_end_with_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 7)
    for content in ("雨" * 50, "ab\ncd\n" * 20, "ä", "a\n", "äöüß\n" * 9):
        source = find_text(story(tmp_path, content))
        chunks = list(source.chunks())
        assert joined(chunks).decode() == content
        assert [chunk.ends for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        for chunk in chunks:
            chunk.text.decode()
            assert 0 < len(chunk.text) <= 7


@pytest.mark.parametrize("length", [1, 5, 16])
def test_sequences_follow_each_other_and_targets_are_one_place_on(tmp_path, length):
    built = data(story(tmp_path), sequence_length=length, max_val_sequences=None)
    content = np.frombuffer(STORY.encode(), np.uint8)
    cut = len(content) - round(0.05 * len(content))
    for loader, part in ((built.make_overfit_loader(), content[:cut]), (built.val_dataloader(), content[cut:])):
        tokens = torch.cat([batch["tokens"] for batch in loader]).flatten()
        targets = torch.cat([batch["targets"] for batch in loader]).flatten()
        assert tokens.dtype == targets.dtype == torch.int64
        assert len(tokens) == (len(part) - 1) // length * length
        assert tokens.tolist() == part[: len(tokens)].tolist()
        assert targets.tolist() == part[1 : len(tokens) + 1].tolist()
    assert abs(cut - 0.95 * len(content)) < 4


def test_an_epoch_trains_on_every_sequence_once_in_an_order_of_its_own(tmp_path):
    built = data(story(tmp_path), batch_size=2, seed=3)
    loader = built.make_train_loader(limit=None)
    epochs = [read(loader) for _ in range(2)]
    in_order = read(built.make_overfit_loader())
    assert {tuple(row) for row in epochs[0].tolist()} <= {tuple(row) for row in in_order.tolist()}
    assert len(epochs[0]) == built.spec.num_train // 2 * 2
    assert not torch.equal(*epochs)
    again = data(tmp_path / "story.txt", batch_size=2, seed=3).make_train_loader(limit=None)
    assert torch.equal(read(again), epochs[0])
    other = data(tmp_path / "story.txt", batch_size=2, seed=4)
    assert not torch.equal(read(other.make_train_loader(limit=None)), epochs[0])
    assert torch.equal(read(other.val_dataloader()), read(built.val_dataloader()))


def test_validation_is_spread_over_what_is_held_back(tmp_path):
    content = "".join(f"{number:07d}\n" for number in range(2000))
    built = data(story(tmp_path, content), sequence_length=8, val_fraction=0.5, max_val_sequences=5)
    rows = read(built.val_dataloader())
    numbers = [int(bytes(row[:7].tolist())) for row in rows]
    assert numbers == [1000, 1199, 1399, 1599, 1799]
    assert built.spec.num_val == 5


# -- files and folders ------------------------------------------------------------------------------------------------


def test_folder_is_read_in_the_order_of_its_paths_without_hidden_files(tmp_path):
    folder = tmp_path / "mine"
    for name, text in {"b.txt": "bb", "a/z.md": "az", ".git/x.txt": "no", "c.py": "no", "B.TXT": "BB"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    assert joined(find_text(folder).chunks()) == b"BBazbb"
    assert joined(find_text(folder, pattern="*.py").chunks()) == b"no"
    assert find_text(folder).name == "mine"


ROWS = [{"text": "first Zoë"}, {"text": ""}, {"text": "second\nline"}, {"text": "x" * 50, "other": 1}]


def test_zipped_texts_and_marks_of_byte_order_are_read_and_others_counted(tmp_path, caplog):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone ")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"\xef\xbb\xbftwo"))
    for name in ("c.pdf", "d.zip", "e.tar.gz", "f.PDF"):
        (tmp_path / name).write_bytes(b"%PDF")
    assert joined(find_text(tmp_path).chunks()) == b"one two"
    assert "4 files that are no text by their endings (.PDF, .pdf, .tar.gz, .zip) are left out" in caplog.text
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"two" * 500)[:-12])
    with pytest.raises(BadInputError, match=r"b\.txt\.gz cannot be read after \d+ bytes"):
        joined(find_text(tmp_path).chunks())


def write_rows(folder: Path, kind: str) -> Path:
    path = folder / f"rows.{kind}"
    lines = "\n".join(json.dumps(row) for row in ROWS)
    if kind == "parquet":
        Dataset.from_list([{"text": row["text"]} for row in ROWS]).to_parquet(str(path))
    elif kind == "json.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(f"{lines}\n\n")
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json.gz", "parquet"])
def test_rows_of_a_column_are_documents(tmp_path, kind):
    source = find_text(write_rows(tmp_path, kind))
    assert list(source.chunks()) == [TextChunk(text=row["text"].encode(), ends=True) for row in ROWS if row["text"]]
    assert source.name == "rows"


def test_kinds_may_lie_in_one_folder(tmp_path):
    for kind in ("jsonl", "parquet", "json.gz"):
        write_rows(tmp_path, kind)
    story(tmp_path)
    text = joined(find_text(tmp_path).chunks())
    assert text.count(b"second\nline") == 3
    assert text.count(STORY.encode()) == 1


def test_key_of_a_set_depends_on_where_documents_end_and_its_hash_does_not(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, parts in ((one, ["ab", "c"]), (two, ["a", "bc"])):
        folder.mkdir()
        for at, part in enumerate(parts):
            (folder / f"{at}.txt").write_text(part)
    contents = [hash_text(find_text(folder)) for folder in (one, two)]
    assert contents[0].sha256 == contents[1].sha256 == hashlib.sha256(b"abc").hexdigest()
    assert contents[0].key != contents[1].key


def test_path_replaces_the_embedded_text(tmp_path):
    built = build_data("pysource", task="language", batch_size=4, path=str(story(tmp_path)), sequence_length=16)
    assert built.spec.dataset == "story"
    copy = build_data("c4", task="language", batch_size=4, path=str(tmp_path), sequence_length=16, tokenizer="bytes")
    assert copy.spec.dataset == tmp_path.name


def test_large_set_is_mapped_from_disk_and_gives_the_same_batches(tmp_path, monkeypatch, cache):
    small = data(story(tmp_path))
    monkeypatch.setattr(token_arrays, "IN_MEMORY_BYTES", 100)
    large = data(tmp_path / "story.txt")
    assert isinstance(large.train_source.tokens, np.memmap)
    assert len(list(cache.iterdir())) == 2
    for one, other in zip(small.make_train_loader(limit=None), large.make_train_loader(limit=None), strict=True):
        assert torch.equal(one["tokens"], other["tokens"])
        assert torch.equal(one["targets"], other["targets"])


# -- what is wrong ----------------------------------------------------------------------------------------------------


def test_path_without_text_is_named(tmp_path):
    with pytest.raises(BadInputError, match=r"dataset.path=.*nothing.txt does not exist: give a text file in UTF-8"):
        data(tmp_path / "nothing.txt")
    with pytest.raises(BadInputError, match=r"dataset.path=.* holds no text; give a text file"):
        data(tmp_path)
    (tmp_path / "image.png").write_bytes(b"1")
    (tmp_path / "code.c").write_bytes(b"1")
    with pytest.raises(
        BadInputError, match=r"holds no text, only .c, .png: dataset.pattern='\*.c' reads those as text"
    ):
        data(tmp_path)
    with pytest.raises(BadInputError, match=r"holds no file that matches '\*.py'"):
        data(tmp_path, pattern="*.py")
    with pytest.raises(BadInputError, match=r"dataset text needs dataset.path=FILE_OR_FOLDER, or dataset.hub"):
        build_data("text", task="language", batch_size=4)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.txt", "Hello there\n".encode("utf-16-le") * 50, r"a tenth or more of .*a.txt is NUL .* byte 0, .*utf-16le"),
        ("a.txt", "Hello there\n".encode("utf-16") * 50, r"is not UTF-8 text \(byte 0: .*iconv -f utf-16 -t utf-8"),
        ("a.txt.xz", b"\xfd7zXZ", r"holds no text, only .xz: unpack .xz files first, of compressed ones .gz alone"),
        ("a.TAR.gz", b"\x1f\x8b", r"holds no text, only .tar.gz: unpack .tar.gz files first, of compressed ones"),
    ],
)
def test_texts_in_another_encoding_or_archive_are_refused_with_the_way_to_convert_them(tmp_path, name, content, told):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInputError, match=told):
        joined(find_text(tmp_path).chunks())


def test_a_table_that_is_read_as_text_is_told(tmp_path, caplog):
    (tmp_path / "a.CSV").write_text("text,label\n" + "word word,1\n" * 200)
    assert data(tmp_path / "a.CSV").spec.num_train > 0
    assert "a.CSV is read as plain text, columns and all: JSON lines and parquet have a text column" in caplog.text


@pytest.mark.parametrize("ending", [".tar.gz", ".tgz", ".zip", ".txt.zst"])
def test_an_archive_is_not_read_as_text(tmp_path, ending):
    file = tmp_path / f"corpus{ending}"
    file.write_bytes(b"PK")
    (tmp_path / "a.txt").write_text("text")
    last = "." + ending.rpartition(".")[2] if ending != ".tar.gz" else ending
    told = rf"corpus{re.escape(ending)} is packed: unpack {re.escape(last)} files first, of compressed ones .gz alone"
    with pytest.raises(BadInputError, match="dataset.path=.*" + told):
        find_text(file)
    with pytest.raises(
        BadInputError, match=r"dataset.pattern=\*\.\* takes .*corpus.* or give a pattern that leaves it out"
    ):
        find_text(tmp_path, pattern="*.*")


@pytest.mark.parametrize("before_it", [0, 20])
def test_file_that_is_no_utf8_is_named_with_the_place(tmp_path, monkeypatch, before_it):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 9)
    path = tmp_path / "latin.txt"
    path.write_bytes("ä".encode() * before_it + "naïve".encode("latin-1"))
    with pytest.raises(BadInputError, match=rf"latin.txt is not UTF-8 text \(byte {2 * before_it + 2}: invalid"):
        data(path)
    path.write_bytes("ä".encode() * before_it + "ä".encode()[:1])
    with pytest.raises(BadInputError, match=rf"latin.txt is not UTF-8 text \(byte {2 * before_it}: unexpected end"):
        data(path)


WRONG = {
    "no column": (
        '{"text": "a"}\n{"body": "b", "id": 1}',
        "rows.jsonl, line 2: there is no column 'text'.*=body|id, or leave the row",
    ),
    "no text": ('{"text": 3}', "rows.jsonl, line 1: column 'text' must hold text, not int: write"),
    "nothing": ('{"text": null}', "line 1: column 'text' must hold text, not NoneType: .* or leave the row out"),
    "no object": ("3", "rows.jsonl, line 1: there must be an object such as {'text': 'a text'}, not '3'$"),
    "a list": ("[1]", "rows.jsonl, line 1: there must be an object such as .* not '.1.'"),
    "no json": ('{"text": "a"}\n{"text": ', "rows.jsonl, line 2: no JSON object per line can be read there"),
}


@pytest.mark.parametrize("case", WRONG)
def test_line_that_cannot_be_used_is_named(tmp_path, case):
    content, message = WRONG[case]
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(BadInputError, match=message.replace("|", r"\|")):
        data(path)


@pytest.mark.parametrize(("name", "mark"), [("a.json", b""), ("b.JSON", b"\xef\xbb\xbf"), ("c.json.gz", b"")])
def test_a_file_that_is_one_list_of_json_is_read_as_lines_are(tmp_path, name, mark):
    rows = [{"text": "word " * 200 + str(number)} for number in range(4)]
    lines, listed = tmp_path / "lines.jsonl", tmp_path / name
    lines.write_text("\n".join(map(json.dumps, rows)))
    content = mark + json.dumps(rows, indent=2).encode()
    listed.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert data(listed).spec.num_train == data(lines).spec.num_train
    listed.write_bytes(gzip.compress(content[:-40]) if name.endswith(".gz") else content[:-40])
    with pytest.raises(BadInputError, match=rf"{name}, line 1\d: no JSON object per line"):
        data(listed)
    rows[2] = {"body": "x"}
    listed.write_bytes(gzip.compress(json.dumps(rows).encode()) if name.endswith(".gz") else json.dumps(rows).encode())
    with pytest.raises(BadInputError, match=rf"{name}, entry 3: there is no column 'text'"):
        data(listed)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
@pytest.mark.parametrize("kind", ["cut", "utf-16"])
def test_nul_characters_end_the_reading_of_json_at_once(tmp_path, name, kind):
    """A cut download of a TB takes no memory, as nothing behind the first NUL characters is read."""
    path = tmp_path / name
    text = json.dumps({"text": "word " * 9}) + "\n"
    text = f"[{text}" if name == "a.json" else text
    whole = text.encode("utf-16" if kind == "utf-16" else "utf-8")
    path.write_bytes(gzip.compress(whole + bytes(1 << 20)) if name.endswith(".gz") else whole)
    if not name.endswith(".gz"):
        with path.open("r+b") as file:
            file.truncate(1 << 40)
    with pytest.raises(BadInputError, match=rf"{name}, line [12]: NUL characters, .*load it again"):
        data(path)


def test_parquet_that_cannot_be_used_is_named(tmp_path):
    path = write_rows(tmp_path, "parquet")
    with pytest.raises(
        BadInputError, match=r"rows.parquet: there is no column 'body'; name it with .*text_column=text"
    ):
        data(path, text_column="body")
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(BadInputError, match=r"rows.parquet cannot be read as parquet \("):
        data(path)
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    with pytest.raises(BadInputError, match=r"rows.parquet holds no rows"):
        data(path)


def test_torn_archive_is_named(tmp_path):
    path = write_rows(tmp_path, "json.gz")
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(BadInputError, match=r"rows.json.gz, line \d: no JSON object per line can be read"):
        data(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 0}, "dataset.sequence_length must be at least 1 token, not 0"),
        ({"max_val_sequences": 0}, "dataset.max_val_sequences must be at least 1, or null for all, not 0"),
        ({"val_fraction": 1.0}, "val_fraction must lie between 0 and 1, not 1.0"),
        ({"sequence_length": 9000}, "training text of story has .* tokens, too few for one sequence of 9000"),
        ({"sequence_length": 500}, "validation text of story has .* tokens, too few .* a larger dataset.val_fraction"),
        ({"batch_size": 1000}, "a step of 1000 samples does not fit the"),
    ],
)
def test_impossible_sizes_are_refused(tmp_path, options, message):
    with pytest.raises(BadInputError, match=message):
        data(story(tmp_path), **options).make_train_loader(limit=None)


def test_empty_text_is_refused(tmp_path):
    with pytest.raises(BadInputError, match=r"story.txt is empty: give a text file"):
        data(story(tmp_path, ""))
    source = TextFiles(name="two", files=(tmp_path / "story.txt", tmp_path / "story.txt"))
    with pytest.raises(BadInputError, match=r"the text of 2 files, .*story.txt to story.txt, is empty"):
        hash_text(source)
