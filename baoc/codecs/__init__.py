"""How state tensors are kept: one codec per row of `catalogue.CODECS`, each with an error bound that a test holds."""

from baoc.codecs.base import Codec
from baoc.codecs.grouped import GROUPED
from baoc.codecs.packed import PACKED
from baoc.codecs.plain import PLAIN

__all__ = ["CODEC_IMPLS", "Codec"]

CODEC_IMPLS: dict[str, Codec] = {codec.info.name: codec for codec in (*PLAIN, *GROUPED, *PACKED)}
