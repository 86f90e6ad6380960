"""Finds conf/, experiments/ and sweeps/: inside an installed wheel, or beside the package in a checkout."""

from functools import cache
from pathlib import Path

from baoc.errors import BadInputError

_PACKAGE = Path(__file__).resolve().parent.parent


@cache
def root() -> Path:
    """The folder that holds conf/, experiments/ and sweeps/."""
    for folder in (_PACKAGE / "_assets", _PACKAGE.parent):
        if (folder / "conf" / "config.yaml").is_file():
            return folder
    raise BadInputError(
        f"conf/config.yaml is neither in {_PACKAGE / '_assets'} nor beside the package: install baoc again"
    )


def conf() -> Path:
    return root() / "conf"


def option_files(group: str) -> dict[str, Path]:
    """Name -> file of each option of a group of conf/, or of `experiments` or `sweeps`; empty for an unknown group."""
    folder = root() / group if group in ("experiments", "sweeps") else conf() / group
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def description(file: Path) -> str:
    """The one-line description of an option: the first comment of its file."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and "@package" not in line:
            return line.lstrip("# ").strip()
    return ""
