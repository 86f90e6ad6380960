"""A network as planning sees it: parameters, their roles, the blocks that share a spec."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod


class Role(StrEnum):
    """The function of a parameter in its network; priors of risk are given by role."""

    EMBEDDING = "embedding"
    NORM = "norm"  # norm layers, and everything with fewer than two dimensions
    HEAD = "head"
    ATTENTION = "attention"
    MLP = "mlp"
    CONV = "conv"
    MODULATION = "modulation"
    OTHER = "other"


class Part(StrEnum):
    """Which part of attention or mlp a matrix is, where its name or shape tells."""

    QK = "qk"  # query and key
    VO = "vo"  # value and output
    IN = "in"  # into the mlp, its gate included
    OUT = "out"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamInfo:
    """One trainable parameter, tied ones once: the first name owns, the others are `aliases`.

    `whole`: its global shape where ranks hold some indices of its first dimension each (fully_shard). `shape` is the
    same where it is described for a plan, and those of one rank where it is stepped.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str  # "float32", "bfloat16", ...
    role: Role
    depth: int | None = None  # index of the layer it is in; None outside any layer list
    group: int = 0  # index of the user's parameter group
    aliases: tuple[str, ...] = ()
    transposed: bool = False  # stored (in, out), as GPT-2's Conv1D
    whole: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def matrix_shape(self) -> tuple[int, int] | None:
        """(fan_out, fan_in) as rules by row and column see it; None where there is no matrix. See `matrix_shape`.

        Some rows of a sharded matrix are a matrix, though it be a single one.
        """
        shape = matrix_shape(self.shape if self.whole is None else self.whole)
        if shape is not None and self.whole is not None:
            shape = (self.numel // shape[1], shape[1])
        return (shape[1], shape[0]) if shape is not None and self.transposed else shape


def matrix_shape(shape: Sequence[int]) -> tuple[int, int] | None:
    """The (rows, columns) of a tensor seen as a matrix: dimensions of size 1 dropped, then the first against the rest.

    None for what is a vector, a scalar or empty after that, so (1, 1, d) is a vector and (d, 3, 16, 16) is (d, 768).
    """
    kept = [size for size in shape if size != 1]
    if len(kept) < 2 or 0 in kept:
        return None
    return kept[0], prod(kept[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A named set of parameters sharing one optimizer spec. `part` is that of all of them, None if they differ."""

    name: str
    params: tuple[ParamInfo, ...]
    role: Role
    depth: int | None = None
    part: Part | None = None

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDataSpec:
    """Properties of a set of labelled images: `image_size` is height and width in pixels."""

    dataset: str
    image_size: int
    channels: int
    num_classes: int
    num_train: int
    num_val: int

    def __str__(self) -> str:
        shape = f"{self.channels} x {self.image_size} x {self.image_size}"
        many = f"{self.num_train:,} images" if self.num_train else "a stream of images"
        return f"{self.dataset}, {many} of {shape} in {self.num_classes:,} classes, {self.num_val:,} held back"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDataSpec:
    """Properties of a set of token sequences, each `sequence_length` tokens to predict.

    `num_train` (0 for a stream, which has no end) and `num_val` count sequences; `bytes_per_token` of the validation
    text turns a loss into bits per byte. `sha256` of all text, where it lies in files: compare runs at equal text only.
    `mask_token`: the one that stands for a hidden token, where the tokenizer has such.
    """

    dataset: str
    vocab_size: int
    sequence_length: int
    num_train: int
    num_val: int
    bytes_per_token: float = 1.0
    sha256: str = ""
    mask_token: int | None = None

    def __str__(self) -> str:
        many = f"{self.num_train:,} sequences" if self.num_train else "a stream of sequences"
        tokens = f"{self.sequence_length:,} tokens out of {self.vocab_size:,}"
        return f"{self.dataset}, {many} of {tokens}, {self.num_val:,} held back"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDataSpec:
    """Properties of samples that the user's own code gives. `num_classes` is None where none were given."""

    dataset: str
    num_train: int
    num_val: int
    num_classes: int | None = None

    def __str__(self) -> str:
        classes = f" in {self.num_classes:,} classes" if self.num_classes else ""
        return f"{self.dataset}, {self.num_train:,} samples{classes}, {self.num_val:,} held back"


DataSpec = ImageDataSpec | TextDataSpec | OwnDataSpec  # latents are images of several channels
