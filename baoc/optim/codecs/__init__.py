"""How state tensors are kept: one codec per row of `catalogue.CODECS`, each with an error bound that a test holds."""

from baoc.optim.codecs.base import Codec
from baoc.optim.codecs.grouped import GROUPED
from baoc.optim.codecs.packed import PACKED
from baoc.optim.codecs.plain import PLAIN

__all__ = ["CODEC_IMPLS", "Codec"]

CODEC_IMPLS: dict[str, Codec] = {codec.info.name: codec for codec in (*PLAIN, *GROUPED, *PACKED)}
