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
    """One trainable parameter. A tied one is described once, by its first name; its other names are `aliases`.

    `whole`: the unsharded shape of a parameter that fully_shard splits along its first dimension; None for others.
    `shape` is then the unsharded shape in a plan, and the shape of the rank's shard in an optimizer.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str  # "float32", "bfloat16", ...
    role: Role
    depth: int | None = None  # index of its layer; None outside of layer lists
    group: int = 0  # index of the user's parameter group
    aliases: tuple[str, ...] = ()
    transposed: bool = False  # stored (in, out), as GPT-2's Conv1D
    whole: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def matrix_shape(self) -> tuple[int, int] | None:
        """(fan_out, fan_in) as rules by row and column see it; None if it is no matrix (see the function). A shard of a
        matrix is a matrix, even if it has one row."""
        shape = matrix_shape(self.shape if self.whole is None else self.whole)
        if shape is not None and self.whole is not None:
            shape = (self.numel // shape[1], shape[1])
        return (shape[1], shape[0]) if shape is not None and self.transposed else shape

    @property
    def is_stack(self) -> bool:
        """Whether it is several matrices in one tensor, such as (num_experts, in, out). A kernel of a convolution is
        one matrix, (out, in x length)."""
        shape = self.shape if self.whole is None else self.whole
        return len(shape) == 3 and 1 not in shape and self.role is not Role.CONV


def matrix_shape(shape: Sequence[int]) -> tuple[int, int] | None:
    """(rows, columns) of a tensor as a matrix: dimensions of size 1 are dropped, all but the first are merged. None for
    a vector, a scalar or an empty tensor. So (1, 1, d) is a vector and (d, 3, 16, 16) is (d, 768)."""
    sizes = [size for size in shape if size != 1]
    if len(sizes) < 2 or 0 in sizes:
        return None
    return sizes[0], prod(sizes[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A named set of parameters that share one optimizer spec. `depth` and `part` are None where they differ."""

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
    """Properties of a set of token sequences, each of `sequence_length` tokens to predict.

    `num_train` (0 for a stream, which has no end) and `num_val` count sequences. `bytes_per_token`, of the validation
    text, turns a loss into bits per byte. `sha256`: of all text that lies in files; runs are comparable at equal text.
    `mask_token`: the token that stands for a hidden one, if the tokenizer has it.
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
    """Properties of a data set made by the user's own code. `num_classes` is None if that names none."""

    dataset: str
    num_train: int
    num_val: int
    num_classes: int | None = None

    def __str__(self) -> str:
        classes = f" in {self.num_classes:,} classes" if self.num_classes else ""
        return f"{self.dataset}, {self.num_train:,} samples{classes}, {self.num_val:,} held back"


DataSpec = ImageDataSpec | TextDataSpec | OwnDataSpec  # latents are images of several channels
IGNORE_INDEX = -100  # target of tokens that do not count in the loss, the default of torch's cross-entropy
