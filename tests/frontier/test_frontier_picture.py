"""The page in a headless Chromium: a picture that shows something; and what is said where there is none."""

import re
import subprocess
from pathlib import Path

import pytest

from baoc.frontier import picture
from baoc.frontier.build import frontier_of
from baoc.frontier.report import main
from tests.support.sweep_jobs import error, three_families
from tests.support.waiting import PATIENCE_S

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


def test_a_figure_offers_a_picture_and_no_cloud(tmp_path: Path):
    """In a browser, with texts that would blank a page whose data were not inert."""
    three_families(tmp_path)
    error(tmp_path / "odd", exit_code=4, message="<!--<script")
    frontier_of(tmp_path, show=False)
    program = picture.browser()
    assert program is not None, "this test needs a Chromium"
    command = [program, "--headless=new", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--no-sandbox"]
    page = (tmp_path / "frontier.html").absolute().as_uri()
    command += ["--virtual-time-budget=10000", "--dump-dom", page]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    body = done.stdout[done.stdout.rindex("<body") :]
    shown = re.sub(r"<script.*?</script>", "", body, flags=re.DOTALL)
    assert 'data-ready="yes"' in shown and "&lt;!--&lt;script" in shown
    assert 'data-title="Download plot as a PNG"' in shown
    assert "cloud" not in shown.lower()


def test_without_a_browser_the_page_stands_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    three_families(tmp_path)
    monkeypatch.setattr(picture, "BROWSERS", ())
    assert main([str(tmp_path), "--picture"]) == 0
    assert "no picture" in capsys.readouterr().out
    assert (tmp_path / "frontier.html").is_file() and not (tmp_path / "frontier.png").exists()
