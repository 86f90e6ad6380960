"""Lists a user's folder of images with one subfolder per class, and finds its training and validation parts."""

import logging
from dataclasses import dataclass
from pathlib import Path

from baoc.data.splits import HELD_OUT_WORDS, TRAIN_WORDS, visible_files
from baoc.errors import BadInputError

log = logging.getLogger(__name__)
IMAGE_SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Files sorted by path; `labels[i]` is the index of file i's class in `classes`."""

    files: tuple[Path, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]


def find_split_folders(path: Path) -> tuple[Path, Path | None]:
    """Folders of training and validation images: `train` and `val` (else `test`) in `path` if both exist.

    Otherwise (`path`, None), and validation images are held out of `path`.
    """
    named = {entry.name.lower(): entry for entry in path.iterdir() if entry.is_dir()}
    train = next((named[name] for name in TRAIN_WORDS if name in named), None)
    val = next((named[name] for names in HELD_OUT_WORDS for name in names if name in named), None)
    return (train, val) if train is not None and val is not None else (path, None)


def list_images(folder: Path, *, classes: tuple[str, ...] | None = None) -> Listing:
    """Every image below each class's folder; those of a folder without folders are of one class. `classes` are those of
    the training part, for a validation part.

    BadInputError names a folder without classes, a class without images, or one that training does not have.
    """
    folders = visible_files(folder, (entry for entry in folder.iterdir() if entry.is_dir()))
    loose = [file for file in folder.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file()]
    if not folders:
        found = visible_files(folder, loose)
        if found and classes is not None and len(classes) > 1:
            raise BadInputError(
                f"{folder} has no folders of classes, which the training images have: {classes[0]}, ..."
            )
        if found:
            return Listing(files=tuple(found), labels=(0,) * len(found), classes=classes or (folder.name,))
        raise BadInputError(f"{folder} holds no folders and no images: a folder of images has one folder per class")
    if classes is not None and (foreign := [entry for entry in folders if entry.name not in classes]):
        raise BadInputError(f"{foreign[0]} is a class that the training images do not have: {', '.join(classes[:10])}")
    names: tuple[str, ...] = tuple(entry.name for entry in folders) if classes is None else classes
    files: list[Path] = []
    labels: list[int] = []
    if stray := visible_files(folder, loose):
        log.warning("%s: %d images beside the folders of classes are of no class and left out", folder, len(stray))
    left_out, endings = len(loose) - len(stray), set[str]()
    for entry in folders:
        held = [file for file in entry.rglob("*") if not file.is_dir()]
        found = [
            file for file in visible_files(entry, held) if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file()
        ]
        left_out += len(held) - len(found)
        endings |= {file.suffix.lower() for file in visible_files(entry, held) if file.suffix} - IMAGE_SUFFIXES
        if not found:
            allowed = " ".join(sorted(IMAGE_SUFFIXES))
            raise BadInputError(f"{entry} holds no image ({allowed}): remove the folder, or put images there")
        if len(below := sorted({file.parent.name for file in found if file.parent != entry})) > 1:
            log.warning("%s: images of %d folders below it (%s, ...) are one class", entry, len(below), below[0])
        files += found
        labels += [names.index(entry.name)] * len(found)
    by_spelling = {name.casefold(): name for name in names}
    if len(by_spelling) < len(names):
        other = next(name for name in names if by_spelling[name.casefold()] != name)
        log.warning("%s: %s and %s are two classes, by case alone", folder, other, by_spelling[other.casefold()])
    if left_out:
        told = f" (endings {', '.join(sorted(endings)[:8])})" if endings else ""
        log.warning(
            "%s: %d hidden files, files that are no images%s and links to nothing are left out", folder, left_out, told
        )
    return Listing(files=tuple(files), labels=tuple(labels), classes=names)
