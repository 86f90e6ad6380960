"""The page in a headless Chromium: a picture that shows something; and what is said where there is none."""

from pathlib import Path

import pytest

from baoc.frontier import picture
from baoc.frontier.report import main
from tests.support.sweep_jobs import three_families

pytestmark = pytest.mark.slow


def test_the_page_is_drawn_and_is_not_blank(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from PIL import Image

    three_families(tmp_path)
    assert main([str(tmp_path), "--picture"]) == 0
    assert f"drawn in {tmp_path / 'frontier.png'}" in capsys.readouterr().out.replace("\n", "")
    drawn = Image.open(tmp_path / "frontier.png").convert("RGB")
    assert drawn.size == picture.SIZE
    colours = {colour for _, colour in drawn.getcolors(maxcolors=2**24) or []}
    assert {(0x0B, 0x6B, 0xCB), (0xD1, 0x70, 0x0F), (0x7A, 0x7F, 0x87)} <= colours  # points of all three families


def test_without_a_browser_the_page_stands_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    three_families(tmp_path)
    monkeypatch.setattr(picture, "BROWSERS", ())
    assert main([str(tmp_path), "--picture"]) == 0
    assert "no picture" in capsys.readouterr().out
    assert (tmp_path / "frontier.html").is_file() and not (tmp_path / "frontier.png").exists()
