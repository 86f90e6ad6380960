"""One check of labels for every reader of labelled images: whole numbers from 0, of two classes or more."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from baoc.errors import BadInputError


def check_labels(
    labels: NDArray[Any], *, of: str, declared: int | None = None, for_training: bool = True
) -> tuple[NDArray[np.int64], int]:
    """(labels as int64, number of classes).

    Args:
        of: what holds them, for messages.
        declared: classes that the set itself names.
        for_training: False for a part that is held back, which may have images of one class only.
    """
    if labels.dtype.kind not in "ui":
        raise BadInputError(f"labels of {of} have dtype {labels.dtype}; they must be integers, 0 for the first class")
    low, high = int(labels.min()), int(labels.max())
    limit = declared or len(labels)
    if low < 0 or high >= limit:
        row = int(labels.argmin() if low < 0 else labels.argmax())
        allowed = f"the {declared} classes that there are" if declared else f"the number of images ({limit})"
        raise BadInputError(
            f"label {low if low < 0 else high} of image {row} in {of} is out of range: labels count classes from 0, "
            f"below {allowed}"
        )
    if low == high and for_training:
        raise BadInputError(f"every label of {of} is {low}: there is nothing to tell apart with one class")
    return labels.astype(np.int64), declared or high + 1
