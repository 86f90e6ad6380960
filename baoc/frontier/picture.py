"""frontier.png: a screenshot of frontier.html by an installed Chromium, for mails and reports."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SIZE = (1400, 1800)  # pixels: the page's frontiers and its table
TIMEOUT_S = 60.0


def find_browser() -> str | None:
    """Path of the first Chromium on PATH; None if there is none."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def render_picture(page: Path) -> Path | None:
    """Renders `page` into a PNG of the same name; None if there is no browser, or it fails or times out."""
    program = find_browser()
    if program is None:
        return None
    png = page.with_suffix(".png")
    with tempfile.TemporaryDirectory() as profile:
        command = [program, "--headless=new", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        command += ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to run as root with its sandbox
        command += [f"--window-size={SIZE[0]},{SIZE[1]}", "--virtual-time-budget=10000", f"--screenshot={png}"]
        try:
            done = subprocess.run([*command, page.absolute().as_uri()], capture_output=True, timeout=TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            return None
    return png if done.returncode == 0 and png.is_file() else None
