"""Lists a folder of images with one subfolder per class, and finds its training and validation folders."""

import logging
from dataclasses import dataclass
from pathlib import Path

from baoc.data.splits import HELD_OUT_WORDS, TRAIN_WORDS, visible_files
from baoc.errors import BadInputError

log = logging.getLogger(__name__)
IMAGE_SUFFIXES = frozenset(
    (".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Files sorted by path; `labels[i]` is the index of file i's class in `classes`."""

    files: tuple[Path, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]


def find_split_folders(path: Path) -> tuple[Path, Path | None]:
    """Returns the folders of training and validation images: `train` and `val` (else `test`) in `path` if both exist.

    Otherwise validation images are held out of `path`, or of its `train` if that is its only folder and has folders.
    """
    subfolders = {entry.name.lower(): entry for entry in path.iterdir() if entry.is_dir()}
    train = next((subfolders[name] for name in TRAIN_WORDS if name in subfolders), None)
    val = next((subfolders[name] for names in HELD_OUT_WORDS for name in names if name in subfolders), None)
    if train is None or val is not None:
        return (path, None) if train is None else (train, val)
    alone = visible_files(path, subfolders.values()) == [train] and any(entry.is_dir() for entry in train.iterdir())
    return (train if alone else path), None


def list_images(folder: Path, *, classes: tuple[str, ...] | None = None) -> Listing:
    """Lists the images below each class's folder. The images of a folder without folders are of one class.

    `classes`: those of the training images, for a folder of validation images. Raises BadInputError for a folder
    without classes, a class without images, and a class that training does not have.
    """
    class_folders = visible_files(folder, (entry for entry in folder.iterdir() if entry.is_dir()))
    _warn_of_hidden(folder, num_visible=2 if classes else len(class_folders))
    loose_images = [file for file in folder.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file()]
    visible_loose = visible_files(folder, loose_images)
    if not class_folders:
        if not visible_loose:
            raise BadInputError(f"{folder} holds no folders and no images: a folder of images has one folder per class")
        if classes is not None and len(classes) > 1:
            raise BadInputError(
                f"{folder} has no folders of classes, which the training images have: {classes[0]}, ..."
            )
        _warn_of_tables(folder)
        one_class = classes or (folder.name,)
        return Listing(files=tuple(visible_loose), labels=(0,) * len(visible_loose), classes=one_class)
    if classes is None:
        classes = tuple(entry.name for entry in class_folders)
    elif unknown := [entry for entry in class_folders if entry.name not in classes]:
        raise BadInputError(f"{unknown[0]} is a class that the training images do not have: {', '.join(classes[:10])}")
    if visible_loose:
        num_loose = len(visible_loose)
        log.warning("%s: %d images beside the folders of classes are of no class and left out", folder, num_loose)
    files: list[Path] = []
    labels: list[int] = []
    num_left_out, other_endings = len(loose_images) - len(visible_loose), set[str]()
    for class_folder in class_folders:
        below = [file for file in class_folder.rglob("*") if not file.is_dir()]
        visible = visible_files(class_folder, below)
        images = [file for file in visible if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file()]
        num_left_out += len(below) - len(images)
        other_endings |= {file.suffix.lower() for file in visible if file.suffix} - IMAGE_SUFFIXES
        if not images:
            allowed = " ".join(sorted(IMAGE_SUFFIXES))
            raise BadInputError(f"{class_folder} holds no image ({allowed}): remove the folder, or put images there")
        nested = sorted({file.parent.name for file in images if file.parent != class_folder})
        if len(nested) > 1:
            log.warning(
                "%s: images of %d folders below it (%s, ...) are one class", class_folder, len(nested), nested[0]
            )
        files += images
        labels += [classes.index(class_folder.name)] * len(images)
    by_casefold = {name.casefold(): name for name in classes}
    if len(by_casefold) < len(classes):
        other = next(name for name in classes if by_casefold[name.casefold()] != name)
        log.warning("%s: %s and %s are two classes, by case alone", folder, other, by_casefold[other.casefold()])
    if num_left_out:
        endings = f" (endings {', '.join(sorted(other_endings)[:8])})" if other_endings else ""
        log.warning(
            "%s: %d hidden files, files that are no images%s and links to nothing are left out",
            folder, num_left_out, endings,
        )  # fmt: skip
    return Listing(files=tuple(files), labels=tuple(labels), classes=classes)


def _warn_of_hidden(folder: Path, *, num_visible: int) -> None:
    """Names hidden folders, which may be meant as classes where fewer than two are left."""
    hidden = sorted(entry.name for entry in folder.glob(".*") if num_visible < 2 and entry.is_dir())
    if hidden:
        log.warning("%s: hidden folders are left out, so rename what is a class: %s", folder, ", ".join(hidden[:10]))


def _warn_of_tables(folder: Path) -> None:
    """Says that a table beside images without folders of classes, which may hold their labels, is not read."""
    endings = (".csv", ".tsv", ".json", ".jsonl")
    if tables := [file.name for file in folder.iterdir() if file.suffix.lower() in endings]:
        log.warning(
            "%s: %s is not read, as classes are folders: move the images of each into one of its name, or write "
            "parquet with an image and a label column",
            folder,
            min(tables),
        )
