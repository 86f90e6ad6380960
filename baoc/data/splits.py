"""Which files count as data, and which part of a set they are: the same for folders, tables and sets of the hub."""

import re
from collections.abc import Iterable
from pathlib import Path, PurePath

# Words by which parts are called, the best for holding images back first.
TRAIN_WORDS = ("train", "training")
HELD_OUT_WORDS = (("validation", "val", "valid", "dev", "eval"), ("test", "testing"))
_NO_DATA = (
    frozenset(  # what archives of macOS, and shares and disks of Synology, QNAP, Windows and Linux hold beside files
        ("__macosx", "@eadir", "@recycle", "#recycle", "$recycle.bin", "system volume information", "lost+found")
    )
)


def is_hidden(within: PurePath) -> bool:
    """True for a path inside a set that its owner does not see: .ipynb_checkpoints, ._1.png, __MACOSX, @eaDir."""
    return any(part.startswith(".") or part.lower() in _NO_DATA for part in within.parts)


def visible_files(root: Path, files: Iterable[Path]) -> list[Path]:
    """The `files` below `root` that are not hidden there, sorted."""
    return sorted(file for file in files if not is_hidden(file.relative_to(root)))


def split_in_name(name: str) -> str | None:
    """`train`, `validation` or `test` by a whole word in the name of a file, folder or split; None where none is."""
    words = re.findall(r"[a-z]+", name.lower())
    for role, own in (("train", TRAIN_WORDS), ("validation", HELD_OUT_WORDS[0]), ("test", HELD_OUT_WORDS[1])):
        if any(word in own for word in words):
            return role
    return None


def split_in_path(within: PurePath) -> str:
    """The role of a file by its own name, else by the innermost folder that has one; else it is for training."""
    return next((role for part in reversed(within.parts) if (role := split_in_name(part)) is not None), "train")
