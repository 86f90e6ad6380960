"""Data sets by name, as Lightning DataModules. They do not depend on budgets.

To add one: a file with a DataModule that has `.spec`, and a row here. Rows name their module instead of importing it,
so that listing them imports nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from baoc.core import own_code
from baoc.errors import BadInputError, unknown_name

if TYPE_CHECKING:
    from baoc.data.base import DataModule

__all__ = ["DATASETS", "MODELS_OWN", "Dataset", "build_data", "dataset_row", "require_task"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A row of DATASETS. `builder` in `module` makes the DataModule from the arguments of `build_data` and `options`.

    Args:
        path_row: the row that reads a user's `dataset.path`. None is this row, which also works without a path; a row
            that names itself requires one.
        options: names and defaults.
        option_types: types of options whose default does not show them; a default of None means text or null.
        takes_path: False for generated data.
        tasks: none for any.
        is_own: the user's code; its options are its arguments, and are checked when it is called.
    """

    name: str
    description: str
    tasks: tuple[str, ...]
    module: str
    builder: str
    path_row: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    option_types: Mapping[str, Any] = field(default_factory=dict)
    takes_path: bool = True
    is_own: bool = False

    @property
    def needs_path(self) -> bool:
        return self.path_row == self.name


MODELS_OWN = "model"  # of `tokenizer`: the one that is stored beside the network that is trained
_SPLIT = {"val_fraction": 0.2, "split_seed": 0}
_IMAGES = {
    **_SPLIT,
    "augment": "none",
    "image_size": None,
    "workers": None,
    "hub": None,
    "streaming": None,  # null streams hub sets only
    "image_column": None,
    "label_column": None,
}
_IMAGE_TYPES = {"image_size": int | None, "workers": int | None, "streaming": bool | None}


def _images(name: str, description: str, **row: Any) -> "Dataset":
    """A row for `build_images`: from `dataset.path`, or the set of the Hugging Face hub in its option `hub`."""
    options = {**_IMAGES, **row.pop("options", {})}
    return Dataset(
        name=name,
        description=description,
        tasks=("vision", "diffusion"),
        module="baoc.data.vision_sets",
        builder="build_images",
        options=options,
        option_types=_IMAGE_TYPES,
        **row,
    )


_TEXT = {
    "tokenizer": "bytes",
    "vocab_size": 4096,  # for tokenizer=bpe
    "sequence_length": 128,
    "val_fraction": 0.05,
    "max_val_sequences": 512,
    "text_column": "text",
    "pattern": None,
}
_HUB_TEXT = {"hub": None, "hub_config": None, "train_split": "train", "val_split": None}


def _text(name: str, description: str, **row: Any) -> "Dataset":
    """A row of tokens for language models, read from `dataset.path` if one is given."""
    options = {**_TEXT, **row.pop("options", {})}
    return Dataset(
        name=name,
        description=description,
        tasks=("language", "masked"),
        module="baoc.data.text",
        options=options,
        option_types={"max_val_sequences": int | None},
        **row,
    )


DATASETS: dict[str, Dataset] = {
    row.name: row
    for row in (
        Dataset(
            name="digits",
            description="UCI digits, 1,797 images of 8 x 8 pixels in 10 classes; embedded, needs no network",
            tasks=("vision", "diffusion"),
            module="baoc.data.vision_sets",
            builder="build_digits",
            path_row="images",
            options=_SPLIT,
        ),
        Dataset(
            name="npz",
            description="your own labelled images: dataset.path=FILE.npz with the arrays images and labels",
            tasks=("vision", "diffusion"),
            module="baoc.data.vision_sets",
            builder="build_npz",
            path_row="npz",
            options=_SPLIT,
        ),
        _images(
            "images", "your own: dataset.path=FOLDER with a folder per class, parquet or FILE.npz; or dataset.hub=NAME"
        ),
        Dataset(
            name="fashion_mnist",
            description="Fashion-MNIST, 60,000 images of 28 x 28 pixels in 10 classes, from IDX files (Debian package)",
            tasks=("vision", "diffusion"),
            module="baoc.data.vision_sets",
            builder="build_fashion_mnist",
            options={"judged_on": "train", "val_fraction": 1 / 12, "split_seed": 0, "augment": "none"},
        ),
        _images(
            "cifar10",
            "CIFAR-10, 60,000 images of 32 x 32 pixels; dataset.path=PATH, else from the hub",
            options={"hub": "uoft-cs/cifar10", "augment": "crop_flip", "streaming": False},
        ),
        _images(
            "cifar100",
            "CIFAR-100, 60,000 images of 32 x 32 pixels; dataset.path=PATH, else from the hub",
            options={"hub": "uoft-cs/cifar100", "augment": "crop_flip", "streaming": False},
        ),
        _images(
            "imagenet",
            "ImageNet-1k, 1.28M photographs at 224 x 224; dataset.path=PATH, else streamed from the hub",
            options={"hub": "ILSVRC/imagenet-1k", "augment": "crop_flip", "image_size": 224},
        ),
        Dataset(
            name="synthetic_images",
            description="random pixels and random labels, for throughput and memory: nothing can be learned from it",
            tasks=("vision", "diffusion"),
            module="baoc.data.vision_sets",
            builder="build_synthetic",
            options={**_SPLIT, "num_samples": 1024, "num_classes": 1000, "image_size": 224, "channels": 3},
            takes_path=False,
        ),
        Dataset(
            name="latents",
            description="your own latents: dataset.path=FILE.npy of (N, 4, 32, 32), a folder of them, or FILE.parquet",
            tasks=("diffusion",),
            module="baoc.data.latents",
            builder="build_latents",
            path_row="latents",
            options={"val_fraction": 0.05, "split_seed": 0, "scale": None},
            option_types={"scale": float | None},
        ),
        Dataset(
            name="chat",
            description="your own conversations: dataset.path=FILE.jsonl with messages, or prompt and completion",
            tasks=("language",),
            module="baoc.data.chat",
            builder="build_chat",
            path_row="chat",
            options={
                "tokenizer": MODELS_OWN,
                "sequence_length": 512,
                "val_fraction": 0.05,
                "split_seed": 0,
                "max_val_sequences": 512,
            },
            option_types={"max_val_sequences": int | None},
        ),
        Dataset(
            name="random_latents",
            description="noise in the shape (4, 32, 32) of latents, for benchmarks: nothing can be learned from it",
            tasks=("diffusion",),
            module="baoc.data.latents",
            builder="build_random_latents",
            options={"num_samples": 2048, "num_classes": 1000, "val_fraction": 0.05, "split_seed": 0},
        ),
        _text(
            "pysource",
            "the standard library of CPython 3.11.7, 8.8 MB of source as bytes, part of the package",
            builder="build_pysource",
            path_row="text",
        ),
        _text(
            "text",
            "your own: dataset.path=FILE or FOLDER of .txt, .md, .jsonl or .parquet; or dataset.hub=OWNER/NAME",
            builder="build_text",
            options=_HUB_TEXT,
        ),
        _text(
            "c4",
            "C4, English web text, streamed from the hub; dataset.path=FOLDER reads a copy",
            builder="build_text",
            options={
                **_HUB_TEXT,
                "hub": "allenai/c4",
                "hub_config": "en",
                "val_split": "validation",
                "tokenizer": "hub:google-t5/t5-base",
                "sequence_length": 256,
            },
        ),
        _text(
            "fineweb_edu",
            "FineWeb-Edu, educational web text, streamed from the hub; dataset.path=FOLDER reads a copy",
            builder="build_text",
            options={
                **_HUB_TEXT,
                "hub": "HuggingFaceFW/fineweb-edu",
                "hub_config": "sample-10BT",
                "tokenizer": "hub:openai-community/gpt2",
                "sequence_length": 1024,
            },
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
) -> "DataModule":
    """Builds the DataModule `name` for `task`. A `path` replaces the data of an embedded set by the user's own.

    Raises BadInputError for an unknown name or option, a set that does not serve the task, and unusable data.
    """
    require_task(name, task=task)
    row = dataset_row(name)
    if row.is_own:
        from baoc.data.own import build_own

        given = {"batch_size": batch_size, "seed": seed, "accumulate": accumulate}
        return _with(build_own(name, task=task, path=path, options=options, **given), settings=options)
    if path is not None and not row.takes_path:
        raise BadInputError(f"dataset {name} is generated and reads no dataset.path={path}: leave it out")
    if path is not None:
        row, options = DATASETS[row.path_row or name], {**options, "path": path}
    elif row.needs_path:
        raise BadInputError(f"dataset {name} needs dataset.path=...: {row.description}")
    for key in options.keys() - {*row.options, "path"}:
        raise unknown_name(key, what=f"option of dataset {row.name}", allowed=row.options)
    if len(row.tasks) > 1:
        options["task"] = task  # decides how values are scaled
    builder = getattr(import_module(row.module), row.builder)
    settings = {**row.options, **options}
    return _with(builder(batch_size=batch_size, seed=seed, accumulate=accumulate, **settings), settings=settings)


def _with(data: "DataModule", *, settings: Mapping[str, Any]) -> "DataModule":
    data.settings = settings
    return data


def require_task(name: str, *, task: str) -> None:
    """Raises BadInputError if data set `name` is unknown or does not serve `task`; the message lists those that do.

    The user's own code is taken at its word: what it gives is checked by the task.
    """
    serves = dataset_row(name).tasks
    is_own_task = own_code.is_own(task) or task in own_code.declared("baoc.tasks")
    if serves and task not in serves and not is_own_task:
        fitting = [other.name for other in DATASETS.values() if task in other.tasks]
        raise BadInputError(
            f"dataset {name} serves {' and '.join(serves)}, not {task}; "
            f"data sets for {task}: {', '.join(fitting) or 'none'}"
        )


def dataset_row(name: str) -> Dataset:
    """The row of a name, or one for the user's own code. Raises BadInputError for a name that is neither."""
    if name in DATASETS:
        return DATASETS[name]
    if name in own_code.declared("baoc.datasets") or own_code.is_own(name):
        return Dataset(name=name, description="your own code", tasks=(), module="", builder="", is_own=True)
    allowed = [*DATASETS, *own_code.declared("baoc.datasets"), own_code.WRITTEN]
    raise unknown_name(name, what="dataset", allowed=allowed)
