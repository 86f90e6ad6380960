"""Which files count as data, and whether they are for training, validation or test, in folders, tables and hub sets."""

import re
from collections.abc import Iterable
from pathlib import Path, PurePath

# Words that name a split. Of the held-out splits, validation is preferred to test.
TRAIN_WORDS = ("train", "training")
HELD_OUT_WORDS = (("validation", "val", "valid", "dev", "eval"), ("test", "testing"))
_SYSTEM_FOLDERS = frozenset(  # of archives of macOS, and of shares and disks of Synology, QNAP, Windows and Linux
    ("__macosx", "@eadir", "@recycle", "#recycle", "$recycle.bin", "system volume information", "lost+found")
)


def is_hidden(within: PurePath) -> bool:
    """True if any part of the relative path `within` is hidden: .ipynb_checkpoints, ._1.png, __MACOSX, @eaDir."""
    return any(part.startswith(".") or part.lower() in _SYSTEM_FOLDERS for part in within.parts)


def visible_files(root: Path, files: Iterable[Path]) -> list[Path]:
    """Those of `files` whose path below `root` is not hidden, sorted."""
    return sorted(file for file in files if not is_hidden(file.relative_to(root)))


def files_ending_in(ending: str, root: Path) -> list[Path]:
    """The visible files anywhere below `root` whose names end in `ending`, in any case, sorted."""
    in_any_case = "".join(f"[{char}{char.upper()}]" if char.isalpha() else char for char in ending)
    return visible_files(root, (file for file in root.rglob(f"*{in_any_case}") if file.is_file()))


def has_ending(path: Path, ending: str) -> bool:
    return path.suffix.lower() == ending


def split_in_name(name: str) -> str | None:
    """`train`, `validation` or `test`, by a complete word in the name of a file, folder or split; None without one."""
    words_in_name = re.findall(r"[a-z]+", name.lower())
    for split, words in (("train", TRAIN_WORDS), ("validation", HELD_OUT_WORDS[0]), ("test", HELD_OUT_WORDS[1])):
        if any(word in words for word in words_in_name):
            return split
    return None


def split_in_path(within: PurePath) -> str:
    """The split that a file's name says, else the innermost folder whose name says one, else `train`."""
    return next((split for part in reversed(within.parts) if (split := split_in_name(part)) is not None), "train")
