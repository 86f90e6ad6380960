"""Text as packed sequences of tokens, in a Lightning DataModule.

Batches are `{"tokens": (B, T), "targets": (B, T)}`, int64; targets are the tokens shifted by one. Documents are
concatenated and each sequence begins where the last one ended, so every token is predicted once per epoch.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from baoc.data.base import DataModule, MapStyleDataModule, check_val_fraction
from baoc.data.python_library import read_python_library
from baoc.data.sources import evenly_spaced
from baoc.data.text_files import InMemoryText, TextChunk, TextFiles, byte_range, find_text, hash_text
from baoc.data.text_stream import build_stream
from baoc.data.token_arrays import EncodedText, PackedTokens, check_sizes, encode
from baoc.data.tokens import load_tokenizer
from baoc.errors import BadInputError
from baoc.types import TextDataSpec


def build_pysource(**options: Any) -> DataModule:
    """The frozen text of `baoc.data.python_library`, the same on every machine and Python."""
    return _build_from_files(InMemoryText(name="pysource", text=read_python_library()), **options)


def build_text(*, path: str | None = None, hub: str | None = None, **options: Any) -> DataModule:
    """Text of a file or folder at `path`, or of the set `hub` of the Hugging Face hub as a stream."""
    if path is not None:
        return _build_from_files(
            find_text(path, pattern=options["pattern"], text_column=options["text_column"]), **options
        )
    if hub is None:
        raise BadInputError("dataset text needs dataset.path=FILE_OR_FOLDER, or dataset.hub=OWNER/NAME to stream one")
    return build_stream(hub, **options)


def _build_from_files(source: TextFiles, **options: Any) -> "TextDataModule":
    names = ("tokenizer", "vocab_size", "sequence_length", "val_fraction", "max_val_sequences")
    return TextDataModule(source, **{name: options[name] for name in (*names, "batch_size", "seed", "accumulate")})


class TextDataModule(MapStyleDataModule):
    """Text of files. The last `val_fraction` of the bytes is the validation split, for every seed.

    Validation reads `max_val_sequences` evenly spaced sequences of it; None reads all.
    """

    spec: TextDataSpec

    def __init__(
        self,
        source: TextFiles,
        *,
        tokenizer: str = "bytes",
        vocab_size: int = 4096,
        sequence_length: int = 128,
        val_fraction: float = 0.05,
        max_val_sequences: int | None = 512,
        **batches: Any,
    ):
        """`vocab_size` is for tokenizer=bpe; `batches`: batch_size, accumulate and seed of `DataModule`."""
        super().__init__(**batches)
        check_sizes(sequence_length=sequence_length, max_val_sequences=max_val_sequences)
        check_val_fraction(val_fraction)
        content = hash_text(source)
        num_val_bytes = max(1, round(content.num_bytes * val_fraction))
        num_train_bytes = content.num_bytes - num_val_bytes
        key = f"{content.key} {num_train_bytes}"

        def chunks(**bounds: int) -> Iterator[TextChunk]:
            return byte_range(source.chunks(), **bounds)

        train_chunks = partial(chunks, end=num_train_bytes)
        encoder = load_tokenizer(tokenizer, vocab_size=vocab_size, training_chunks=train_chunks, text_key=key)
        train = encode(train_chunks, tokenizer=encoder, num_bytes=num_train_bytes, text_key=f"{key} train")
        val = encode(
            partial(chunks, start=num_train_bytes), tokenizer=encoder, num_bytes=num_val_bytes, text_key=f"{key} val"
        )
        self.train_source = _pack(train, length=sequence_length, name=source.name, split="training")
        self.val_source = _pack(val, length=sequence_length, name=source.name, split="validation")
        self.val_rows = evenly_spaced(len(self.val_source), at_most=max_val_sequences)
        self.spec = TextDataSpec(
            dataset=source.name,
            vocab_size=encoder.vocab_size,
            sequence_length=sequence_length,
            num_train=len(self.train_source),
            num_val=len(self.val_rows),
            bytes_per_token=val.bytes_per_token,
            sha256=content.sha256,
            mask_token=encoder.mask,
        )

    def contents(self) -> tuple[str, ...]:
        return (self.spec.sha256,)


def _pack(text: EncodedText, *, length: int, name: str, split: str) -> PackedTokens:
    packed = PackedTokens(text.tokens, length=length)
    if len(packed) == 0:
        share = "a larger" if split == "validation" else "a smaller"
        raise BadInputError(
            f"the {split} text of {name} has {len(text.tokens)} tokens, too few for one sequence of {length} and the "
            f"token after it: give more text, a smaller dataset.sequence_length or {share} dataset.val_fraction"
        )
    return packed
