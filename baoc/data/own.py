"""Data of the user's own code: a function that returns the training and the validation samples.

A sample is a mapping of tensors, arrays and numbers, or a pair (input, label), which becomes `images` and `labels`.
Samples are stacked to batches. Shuffling and resuming work as for every other data set.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from baoc.core import own_code
from baoc.data.base import DataModule, MapStyleDataModule
from baoc.data.sources import Batch, Source, TensorSource
from baoc.errors import BadInputError
from baoc.types import DataSpec, ImageDataSpec, OwnDataSpec, TextDataSpec

_FACTS = ("num_classes", "vocab_size", "bytes_per_token")


def build_own(
    name: str, *, task: str, path: str | None, options: Mapping[str, Any], batch_size: int, seed: int, accumulate: int
) -> DataModule:
    """Calls the user's function `name` and builds a DataModule from what it returns.

    The function gets `options`, and `path`, `task`, `seed`, `batch_size` and `accumulate` if its signature has them. It
    returns a `DataModule`, (train, val) or (train, val, facts). Each of train and val is a sequence of samples, or one
    mapping of equally long tensors. `facts` may hold num_classes, vocab_size (else guessed from the first 1,000
    samples) and bytes_per_token. Images must be square for a vision model.

    Args:
        batch_size: samples of a micro-batch.
        accumulate: micro-batches of a step.

    Raises:
        BadInputError: for any other return value.
    """
    batches = {"batch_size": batch_size, "seed": seed, "accumulate": accumulate}
    if path is not None:
        options = {**options, "path": path}
    returned = own_code.call(name, key="dataset", options=options, offered={**batches, "task": task, "path": path})
    if isinstance(returned, DataModule):
        if not isinstance(getattr(returned, "spec", None), ImageDataSpec | TextDataSpec | OwnDataSpec):
            raise BadInputError(f"dataset={name} returned a {type(returned).__name__} without a `spec` of baoc.types")
        return returned
    if not isinstance(returned, tuple | list) or len(returned) not in (2, 3):
        raise BadInputError(
            f"dataset={name} returned a {type(returned).__name__}: it must return (train, val), or (train, val, "
            "facts), of data sets with a length and numbered samples"
        )
    facts = returned[2] if len(returned) == 3 else {}
    if not isinstance(facts, Mapping) or (unknown := [key for key in facts if key not in _FACTS]):
        shown = unknown if isinstance(facts, Mapping) else type(facts).__name__
        raise BadInputError(f"dataset={name} returned facts {shown}: a mapping may hold {', '.join(_FACTS)}")
    train = _source(returned[0], name=name, split="train")
    val = _source(returned[1], name=name, split="val")
    return OwnDataModule(name, train=train, val=val, facts=facts, train_data=returned[0], **batches)


class OwnDataModule(MapStyleDataModule):
    """Training and validation samples of the user's code; batches are made in this process.

    `train_data` is what the user's code returned for training; its attributes may tell the number of classes.
    """

    def __init__(
        self, name: str, *, train: Source, val: Source, facts: Mapping[str, Any], train_data: Any = None, **batches: Any
    ):
        super().__init__(**batches)
        self.train_source, self.val_source = train, val
        self.spec = _spec(own_code.short_name(name), train, val, facts=facts, train_data=train_data)


class Samples:
    """Samples of a torch Dataset or a sequence, stacked to batches."""

    def __init__(self, items: Sequence[Any], *, name: str, split: str):
        self._items, self._name, self._split = items, name, split

    def __len__(self) -> int:
        return len(self._items)

    def gather(self, rows: Tensor) -> Batch:
        with own_code.faults("dataset", self._name, doing=f": a sample of its {self._split} part"):
            samples = [self._items[row] for row in rows.tolist()]
        samples = [self._to_tensors(sample) for sample in samples]
        batch: Batch = {}
        for key, first in samples[0].items():
            values = [sample.get(key) for sample in samples]
            if any(value is None or value.shape != first.shape for value in values):
                shapes = sorted({str(tuple(v.shape)) if v is not None else "nothing" for v in values})
                raise BadInputError(
                    f"dataset={self._name}: samples of its {self._split} part have {key!r} of shapes "
                    f"{', '.join(shapes[:4])}, and a batch needs one: crop or pad them"
                )
            batch[key] = torch.stack([cast(Tensor, value) for value in values])
        return batch

    def _to_tensors(self, sample: Any) -> dict[str, Tensor]:
        if isinstance(sample, tuple | list) and len(sample) == 2:
            sample = {"images": sample[0], "labels": sample[1]}
        if not isinstance(sample, Mapping):
            raise BadInputError(
                f"dataset={self._name}: a sample of its {self._split} part is a {type(sample).__name__}: it must be a "
                "mapping of tensors, arrays and numbers, or a pair (input, label)"
            )
        try:
            return {str(key): torch.as_tensor(value) for key, value in sample.items()}
        except (TypeError, ValueError, RuntimeError) as error:
            kinds = ", ".join(f"{key}: {type(value).__name__}" for key, value in sample.items())
            raise BadInputError(
                f"dataset={self._name}: a sample of its {self._split} part holds what is no tensor, array or number "
                f"({kinds}): convert it first"
            ) from error


def _source(data: Any, *, name: str, split: str) -> Source:
    if isinstance(data, Mapping):
        tensors = {str(key): torch.as_tensor(value) for key, value in data.items()}
        lengths = {key: len(value) for key, value in tensors.items()}
        if not lengths or len(set(lengths.values())) > 1:
            raise BadInputError(f"dataset={name}: its {split} part has tensors of different lengths: {lengths}")
        source = TensorSource(tensors)
    elif not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise BadInputError(
            f"dataset={name}: its {split} part is a {type(data).__name__} without length or numbered samples; a stream "
            "needs a baoc.data.base.DataModule of its own"
        )
    else:
        source = Samples(data, name=name, split=split)
    if len(source) == 0:
        raise BadInputError(f"dataset={name}: its {split} part is empty")
    return source


def _spec(name: str, train: Source, val: Source, *, facts: Mapping[str, Any], train_data: Any) -> DataSpec:
    """Chooses the spec by the first sample: square images with classes, tokens of equal length, or anything else."""
    sample = train.gather(torch.zeros(1, dtype=torch.int64))
    sizes = {"dataset": name, "num_train": len(train), "num_val": len(val)}
    num_classes = facts.get("num_classes") or _count_classes(train_data, train, labelled="labels" in sample)
    images = sample.get("images")
    if images is not None and images.ndim == 4 and images.shape[2] == images.shape[3] and num_classes:
        return ImageDataSpec(image_size=images.shape[3], channels=images.shape[1], num_classes=num_classes, **sizes)
    tokens = sample.get("tokens")
    if tokens is not None and tokens.ndim == 2:
        first_tokens = train.gather(torch.arange(min(len(train), 1000)))["tokens"]
        return TextDataSpec(
            vocab_size=facts.get("vocab_size") or int(first_tokens.max()) + 1,
            sequence_length=tokens.shape[1],
            bytes_per_token=float(facts.get("bytes_per_token", 1.0)),
            **sizes,
        )
    return OwnDataSpec(num_classes=num_classes, **sizes)


def _count_classes(train_data: Any, train: Source, *, labelled: bool) -> int | None:
    """Number of classes by `train_data.classes`, as torchvision's sets have it, else by the largest label; or None."""
    class_names = getattr(train_data, "classes", None)
    if isinstance(class_names, Sequence) and class_names:
        return len(class_names)
    if isinstance(train, TensorSource) and labelled:
        labels: Any = train.tensors["labels"]
    else:
        given = (getattr(train_data, name, None) for name in ("targets", "labels"))
        labels = next((values for values in given if values is not None), None)
    if labels is None or callable(labels):
        return None
    values = torch.as_tensor(labels)
    if values.is_floating_point() or values.ndim != 1 or not len(values):
        return None
    return int(values.max()) + 1
