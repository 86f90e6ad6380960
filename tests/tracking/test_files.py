"""Files are whole or absent, a full disk is said, and JSON lines survive a torn end."""

import csv
import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from baoc.errors import BadInputError, OutputError
from baoc.tracking.files import (
    FolderGuard,
    LineFile,
    append_jsonl,
    atomic_write,
    read_json,
    read_jsonl,
    write_csv,
    write_json,
    write_text,
)
from baoc.types import Cost, Role


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_json_holds_dataclasses_enums_paths_and_scalars(tmp_path: Path) -> None:
    value = {
        "cost": Cost(state_bytes=3),
        "role": Role.MLP,
        "nan": float("nan"),
        "np": np.float32(0.5),
        "np_nan": np.float32("nan"),
        "tensor": torch.tensor(2),
        "path": Path("a/b"),
    }
    write_json(tmp_path / "sub" / "x.json", value)
    assert read_json(tmp_path / "sub" / "x.json") == {
        "cost": {
            "state_bytes": 3,
            "host_bytes": 0,
            "shared_bytes": 0,
            "streamed_bytes": 0,
            "step_s": 0.0,
            "link_s": 0.0,
            "weight_bytes": 0,
            "saved_bytes": 0,
        },
        "role": "mlp",
        "nan": None,
        "np": 0.5,
        "np_nan": None,
        "tensor": 2,
        "path": "a/b",
    }


def test_json_refuses_what_it_cannot_hold_and_keeps_the_old_file(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", 1)
    with pytest.raises(TypeError, match="cannot write a object as JSON"):
        write_json(tmp_path / "x.json", {"a": object()})
    assert read_json(tmp_path / "x.json") == 1


def test_a_failure_while_writing_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "old")
    with pytest.raises(KeyboardInterrupt), atomic_write(tmp_path / "a.txt") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert names(tmp_path) == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def test_content_is_on_the_disk_before_it_takes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        calls.append("fsync")
        real_fsync(descriptor)

    def replace(self: Path, target: Path) -> Path:
        calls.append("replace")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    write_text(tmp_path / "a.txt", "new")
    assert calls == ["fsync", "replace", "fsync"]  # the file, its name, the folder that holds the name


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(
        OutputError, match=r"no space left for x\.json in .*free space or set hydra\.run\.dir"
    ) as caught:
        write_json(tmp_path / "x.json", [1, 2])
    assert caught.value.exit_code == 2
    assert names(tmp_path) == []


def test_a_file_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(OutputError, match=r"cannot write .*make the folder writable or set hydra\.run\.dir"):
        write_json(tmp_path / "run" / "x.json", 1)


def test_a_full_disk_while_appending_cuts_the_part_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.jsonl"
    append_jsonl(path, {"a": 1})
    real_write = os.write

    def half(descriptor: int, data: bytes) -> int:
        if len(data) < 8:
            full_disk()
        return real_write(descriptor, data[:5])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OutputError, match=r"no space left for x\.jsonl"):
        append_jsonl(path, {"b": 22})
    monkeypatch.undo()
    assert path.read_bytes() == b'{"a": 1}\n'


def test_a_file_that_would_pass_the_limit_is_said(tmp_path: Path) -> None:
    """RLIMIT_FSIZE, as of `ulimit -f`: an error about a bug would send nobody there."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OutputError, match=r"x\.txt in .* would be larger than a file may be: .*ulimit -f"):
            write_text(tmp_path / "x.txt", "a" * 5000)
        with LineFile(tmp_path / "x.jsonl") as file:
            file.append({"a": "b" * 3000})
            with pytest.raises(OutputError, match=r"x\.jsonl in .* would be larger than a file may be"):
                file.append({"a": "b" * 3000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == ["x.jsonl"] and len(read_jsonl(tmp_path / "x.jsonl")) == 1


class TestWhatIsRemovedMeanwhile:
    def test_a_file_is_written_again_whole(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = tmp_path / "x.jsonl"
        with LineFile(path) as file:
            file.append({"a": 1})
            path.unlink()
            file.append({"a": 2})
            path.unlink()
        assert [line["a"] for line in read_jsonl(path)] == [1, 2]
        assert "was removed while it was written: it is written again, with all that it had" in caplog.text

    def test_a_file_that_was_replaced_is_gone_on_with(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = tmp_path / "x.jsonl"
        with LineFile(path) as file:
            file.append({"a": 1})
            write_text(path, '{"a": 7}')  # as editors do, and without a line break
            file.append({"a": 2})
        assert [line["a"] for line in read_jsonl(path)] == [7, 2]
        assert "was replaced while it was written" in caplog.text

    @pytest.mark.parametrize("how", ["removed", "moved", "made again"])
    def test_a_folder_is_noticed(self, tmp_path: Path, how: str) -> None:
        folder = tmp_path / "run"
        folder.mkdir()
        guard = FolderGuard(folder)
        guard.check()
        shutil.rmtree(folder) if how != "moved" else folder.rename(tmp_path / "other")
        if how == "made again":
            folder.mkdir()
        with pytest.raises(OutputError, match=r"run folder .*run was removed or moved while the run wrote into it"):
            guard.check()
        guard.close()
        guard.check()


def test_csv_has_every_column_in_order_of_appearance(tmp_path: Path) -> None:
    write_csv(tmp_path / "x.csv", [{"a": 1, "b": 0.1}, {"a": None, "c": "x,y"}])
    assert (tmp_path / "x.csv").read_text() == 'a,b,c\n1,0.1,\n,,"x,y"\n'
    write_csv(tmp_path / "y.csv", [{"a": 1, "b": 2}], columns=["b"])
    assert list(csv.DictReader((tmp_path / "y.csv").read_text().splitlines())) == [{"b": "2"}]


def test_a_torn_last_line_is_left_out_by_readers_and_set_aside_by_writers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2')
    assert read_jsonl(path) == [{"a": 1}]
    assert "ends in a torn line of 7 bytes: left out" in caplog.text
    assert path.read_bytes() == b'{"a": 1}\n{"a": 2', "a reader touches nothing: the file may be in use"

    append_jsonl(path, {"a": 3})
    assert read_jsonl(path) == [{"a": 1}, {"a": 3}]
    assert (tmp_path / "x.jsonl.torn").read_bytes() == b'{"a": 2\n'
    assert "set aside in x.jsonl.torn" in caplog.text


def test_a_last_line_that_lacks_its_break_only_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}')
    with LineFile(path) as file:
        file.append({"a": 2})
    assert read_jsonl(path) == [{"a": 1}, {"a": 2}]


def test_damage_before_the_end_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\nnonsense\n{"a": 2}\n')
    with pytest.raises(BadInputError, match="line 2 is not a JSON object"):
        read_jsonl(path)


def test_missing_and_damaged_files_are_said(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="there is no file"):
        read_json(tmp_path / "no.json")
    with pytest.raises(BadInputError, match="there is no file"):
        read_jsonl(tmp_path / "no.jsonl")
    (tmp_path / "half.json").write_text(json.dumps({"a": [1, 2]})[:5])
    with pytest.raises(BadInputError, match="is not JSON"):
        read_json(tmp_path / "half.json")
