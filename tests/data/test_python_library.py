"""The frozen text is the one that was frozen, and comes with its licence."""

from importlib.resources import files
from pathlib import Path

import pytest

from baoc.data import python_library
from baoc.errors import BadInputError


def test_the_text_is_what_was_frozen() -> None:
    text = python_library.read_python_library()
    assert len(text) == python_library.NUM_BYTES and b"__future__" in text[:3000]
    text.decode()
    licence = (files("baoc.data") / "python_library.LICENSE").read_text()
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in licence and "Changes made" in licence


def test_another_asset_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_library, "files", lambda _: tmp_path)
    with pytest.raises(BadInputError, match=r"cannot be read .*install baoc again"):
        python_library.read_python_library()
    (tmp_path / python_library.ASSET).write_bytes(python_library.lzma.compress(b"print()"))
    with pytest.raises(BadInputError, match=r"has sha256 .*, not a54086"):
        python_library.read_python_library()
