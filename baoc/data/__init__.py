"""Data sets by name, as Lightning DataModules. They do not depend on budgets.

To add one: write a file with a DataModule that has `.spec`, and add a `Dataset` here. Entries name their module instead
of importing it, so that listing them imports nothing.
"""

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from baoc.core import own_code
from baoc.errors import BadInputError

if TYPE_CHECKING:
    from baoc.data.base import DataModule

__all__ = ["DATASETS", "MODEL_TOKENIZER", "Dataset", "build_data", "dataset_info", "require_task"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset(own_code.Entry):
    """An entry of DATASETS.

    Args:
        tasks: names of the tasks that the data serve; empty for any task.
        builder: makes the DataModule from batch_size, seed, accumulate and the options.
        path_dataset: name of the entry that reads a user's `dataset.path`. None: this entry, which works without a path
            too. An entry that names itself requires a path.
        takes_path: False for generated data.
    """

    tasks: tuple[str, ...] = ()
    builder: str = ""
    path_dataset: str | None = None
    takes_path: bool = True


MODEL_TOKENIZER = "model"  # value of the option `tokenizer`: the tokenizer in the folder of model.pretrained
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
_SMALL_SPLIT = {"val_fraction": 0.05, "split_seed": 0}
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
_VAL_TYPES = {"max_val_sequences": int | None}

_image_set = partial(Dataset, tasks=("vision", "diffusion"), module="baoc.data.vision_sets")
# Images at `dataset.path`, or the set of the Hugging Face hub that the option `hub` names.
_images = partial(_image_set, builder="build_images", option_types=_IMAGE_TYPES)
_latents = partial(Dataset, tasks=("diffusion",), module="baoc.data.latents")
# Tokens for language models, read from `dataset.path` if it is set.
_text = partial(Dataset, tasks=("language", "masked"), module="baoc.data.text", option_types=_VAL_TYPES)

_ENTRIES = (
    _image_set(
        name="digits", builder="build_arrays", path_dataset="images", options=_SPLIT,
        description="UCI digits, 1,797 images of 8 x 8 pixels in 10 classes; embedded, needs no network",
    ),
    _image_set(
        name="npz", builder="build_arrays", path_dataset="npz", options=_SPLIT,
        description="your own labelled images: dataset.path=FILE.npz with the arrays images and labels",
    ),
    _images(
        name="images", options=_IMAGES,
        description="your own: dataset.path=FOLDER with a folder per class, parquet or FILE.npz; or dataset.hub=NAME",
    ),
    _image_set(
        name="fashion_mnist", builder="build_fashion_mnist",
        description="Fashion-MNIST, 60,000 images of 28 x 28 pixels in 10 classes, from IDX files (Debian package)",
        options={"judged_on": "train", "val_fraction": 1 / 12, "split_seed": 0, "augment": "none"},
    ),
    *(
        _images(
            name=f"cifar{classes}",
            description=f"CIFAR-{classes}, 60,000 images of 32 x 32 pixels; dataset.path=PATH, else from the hub",
            options={**_IMAGES, "hub": f"uoft-cs/cifar{classes}", "augment": "crop_flip", "streaming": False},
        )
        for classes in (10, 100)
    ),
    _images(
        name="imagenet",
        description="ImageNet-1k, 1.28M photographs at 224 x 224; dataset.path=PATH, else streamed from the hub",
        options={**_IMAGES, "hub": "ILSVRC/imagenet-1k", "augment": "crop_flip", "image_size": 224},
    ),
    _image_set(
        name="synthetic_images", builder="build_synthetic", takes_path=False,
        description="random pixels and random labels, for throughput and memory: nothing can be learned from it",
        options={**_SPLIT, "num_samples": 1024, "num_classes": 1000, "image_size": 224, "channels": 3},
    ),
    _latents(
        name="latents", builder="build_latents", path_dataset="latents",
        description="your own latents: dataset.path=FILE.npy of (N, 4, 32, 32), or a folder of them",
        options={**_SMALL_SPLIT, "scale": None}, option_types={"scale": float | None},
    ),
    Dataset(
        name="chat", tasks=("language",), module="baoc.data.chat", builder="ChatDataModule", path_dataset="chat",
        description="your own conversations: dataset.path=FILE.jsonl with messages, or prompt and completion",
        options={"tokenizer": MODEL_TOKENIZER, "sequence_length": 512, **_SMALL_SPLIT, "max_val_sequences": 512},
        option_types=_VAL_TYPES,
    ),
    _latents(
        name="random_latents", builder="build_random_latents", takes_path=False,
        description="noise in the shape (4, 32, 32) of latents, for benchmarks: nothing can be learned from it",
        options={"num_samples": 2048, "num_classes": 1000, **_SMALL_SPLIT},
    ),
    _text(
        name="pysource", builder="build_pysource", path_dataset="text", options=_TEXT,
        description="the standard library of CPython 3.11.7, 8.8 MB of source as bytes, part of the package",
    ),
    _text(
        name="text", builder="build_text", options={**_TEXT, **_HUB_TEXT},
        description="your own: dataset.path=FILE or FOLDER of .txt, .md, .jsonl or .parquet; or dataset.hub=OWNER/NAME",
    ),
    _text(
        name="c4", builder="build_text",
        description="C4, English web text, streamed from the hub; dataset.path=FOLDER reads a copy",
        options={
            **_TEXT, **_HUB_TEXT, "hub": "allenai/c4", "hub_config": "en", "val_split": "validation",
            "tokenizer": "hub:google-t5/t5-base", "sequence_length": 256,
        },
    ),
    _text(
        name="fineweb_edu", builder="build_text",
        description="FineWeb-Edu, educational web text, streamed from the hub; dataset.path=FOLDER reads a copy",
        options={
            **_TEXT, **_HUB_TEXT, "hub": "HuggingFaceFW/fineweb-edu", "hub_config": "sample-10BT",
            "tokenizer": "hub:openai-community/gpt2", "sequence_length": 1024,
        },
    ),
)  # fmt: skip
DATASETS: dict[str, Dataset] = {dataset.name: dataset for dataset in _ENTRIES}


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
    """Builds the DataModule `name` for `task`.

    Args:
        batch_size: samples of a micro-batch.
        accumulate: micro-batches of an optimizer step.
        path: a file or folder of the user, which replaces the data of an embedded set.
        options: those of the entry in DATASETS.

    Raises:
        BadInputError: for an unknown name, a set that does not serve the task, and unusable data.
    """
    require_task(name, task=task)
    dataset = dataset_info(name)
    if dataset.is_own:
        from baoc.data.own import build_own

        data = build_own(
            name, task=task, path=path, options=options, batch_size=batch_size, seed=seed, accumulate=accumulate
        )
        data.settings = options
        return data
    if path is not None and not dataset.takes_path:
        raise BadInputError(f"dataset {name} is generated and reads no dataset.path={path}: leave it out")
    if path is not None:
        dataset, options = DATASETS[dataset.path_dataset or name], {**options, "path": path}
    elif dataset.path_dataset == name:
        raise BadInputError(f"dataset {name} needs dataset.path=...: {dataset.description}")
    if len(dataset.tasks) > 1:
        options["task"] = task  # the builder scales values for it
    builder = getattr(import_module(dataset.module), dataset.builder)
    settings = {**dataset.options, **options}
    data = builder(batch_size=batch_size, seed=seed, accumulate=accumulate, **settings)
    for key in data.ignored_options:
        if settings[key] != dataset.options[key]:
            raise BadInputError(
                f"dataset.{key}={settings[key]} has no effect on {name} as a stream, whose files and held-out samples "
                "it says itself: leave it out"
            )
    data.settings = settings
    return data


def require_task(name: str, *, task: str) -> None:
    """Raises BadInputError if data set `name` is unknown or does not serve `task`; the message lists those that do.

    Own data and own tasks are not checked here: the task checks the batches.
    """
    serves = dataset_info(name).tasks
    if serves and task not in serves and not own_code.is_own_code(task, group="task"):
        fitting = [other.name for other in DATASETS.values() if task in other.tasks]
        raise BadInputError(
            f"dataset {name} serves {' and '.join(serves)}, not {task}; "
            f"data sets for {task}: {', '.join(fitting) or 'none'}"
        )


def dataset_info(name: str) -> Dataset:
    """Returns the entry `name` of DATASETS, or one for the user's own code. Raises BadInputError for other names."""
    return own_code.find_entry(name, group="dataset", registry=DATASETS, own=Dataset)
