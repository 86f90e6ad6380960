"""Data sets by name, as Lightning DataModules. They do not know that training is budgeted.

To add one: a file with a DataModule that has `.spec`, and a row here. Rows name their code instead of importing it, so
that listing them costs nothing.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from baoc.errors import BadInputError, unknown_name

if TYPE_CHECKING:
    from baoc.data.vision import VisionDataModule

__all__ = ["DATASETS", "Dataset", "build_data"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """One row. `builder` in `module` makes the DataModule; it takes the arguments of `build_data` and `options`.

    `path_row`: the row that reads `dataset.path` when a user gives one; a row that names itself cannot do without.
    """

    name: str
    description: str
    tasks: tuple[str, ...]
    module: str
    builder: str
    path_row: str
    options: tuple[str, ...] = ()

    @property
    def needs_path(self) -> bool:
        return self.path_row == self.name


DATASETS: dict[str, Dataset] = {
    row.name: row
    for row in (
        Dataset(
            name="digits",
            description="UCI digits, 1,797 images of 8 x 8 pixels in 10 classes; embedded, needs no network",
            tasks=("vision",),
            module="baoc.data.vision",
            builder="build_digits",
            path_row="npz",
            options=("val_fraction", "split_seed"),
        ),
        Dataset(
            name="npz",
            description="your own labelled images: dataset.path=FILE.npz with the arrays images and labels",
            tasks=("vision",),
            module="baoc.data.vision",
            builder="build_npz",
            path_row="npz",
            options=("val_fraction", "split_seed"),
        ),
    )
}


def build_data(
    name: str,
    *,
    task: str,
    batch_size: int,
    seed: int = 0,
    accumulate: int = 1,
    path: str | None = None,
    **options: Any,
) -> "VisionDataModule":
    """The DataModule of a row, for `task`. A `path` replaces the images of an embedded row by the user's own.

    BadInputError for an unknown name or option, a set that does not serve the task, and data that cannot be used.
    """
    if name not in DATASETS:
        raise unknown_name(name, what="dataset", allowed=DATASETS)
    row = DATASETS[name]
    if path is not None:
        row, options = DATASETS[row.path_row], {**options, "path": path}
    elif row.needs_path:
        raise BadInputError(f"dataset {name} needs dataset.path=...: {row.description}")
    if task not in row.tasks:
        fitting = [other.name for other in DATASETS.values() if task in other.tasks]
        raise BadInputError(
            f"dataset {row.name} serves {' and '.join(row.tasks)}, not {task}; "
            f"data sets for {task}: {', '.join(fitting) or 'none'}"
        )
    for key in options.keys() - {*row.options, "path"}:
        raise unknown_name(key, what=f"option of dataset {row.name}", allowed=row.options)
    builder = getattr(import_module(row.module), row.builder)
    return builder(batch_size=batch_size, seed=seed, accumulate=accumulate, **options)
