"""Tokenizes text into an array of the smallest fitting dtype (uint8, uint16, int32), mapped from disk if large, and
cuts the array into sequences."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from baoc.data.loader import Batch
from baoc.data.text_files import CHUNK_BYTES, TextChunk
from baoc.data.tokens import ByteTokenizer, Tokenizer, Tokens, cache_path, write_cache_file
from baoc.errors import BadInputError

IN_MEMORY_BYTES = 256 << 20  # larger token arrays stay on disk
_HEADER_BYTES = 8  # at the start of a cached array: the number of bytes of its text


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedText:
    """Tokens (N,) in memory or mapped from disk, and the bytes of their text, to which end tokens add none."""

    tokens: Tokens
    num_bytes: int

    @property
    def bytes_per_token(self) -> float:
        return self.num_bytes / max(1, len(self.tokens))


def encode(
    chunks: Callable[[], Iterator[TextChunk]], *, tokenizer: Tokenizer, num_bytes: int, text_key: str
) -> EncodedText:
    """Returns the tokens of `chunks()`, with an end token after each document, from the cache if they are there.

    Byte tokens of a small set are not cached, because they are the text itself.

    Args:
        num_bytes: approximate size of the text.
        text_key: identifies the text in the cache.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    if isinstance(tokenizer, ByteTokenizer) and num_bytes <= IN_MEMORY_BYTES:
        parts = [tokens for tokens, _ in encode_chunks(chunks(), tokenizer=tokenizer)]
        tokens = np.concatenate(parts) if parts else np.empty(0, dtype)
        return EncodedText(tokens=tokens, num_bytes=len(tokens))
    path = cache_path("tokens", text_key, tokenizer.fingerprint, suffix=".bin")
    if not path.is_file():
        write_cache_file(path, write=lambda stream: _write_tokens(stream, chunks(), tokenizer=tokenizer))
    with path.open("rb") as stream:
        text_bytes = int.from_bytes(stream.read(_HEADER_BYTES), "little")
    if path.stat().st_size - _HEADER_BYTES > IN_MEMORY_BYTES:
        return EncodedText(tokens=np.memmap(path, dtype=dtype, mode="r", offset=_HEADER_BYTES), num_bytes=text_bytes)
    return EncodedText(tokens=np.fromfile(path, dtype=dtype, offset=_HEADER_BYTES), num_bytes=text_bytes)


def encode_chunks(chunks: Iterable[TextChunk], *, tokenizer: Tokenizer) -> Iterator[tuple[Tokens, int]]:
    """Yields (tokens, bytes of text) of each chunk. Encodes several at once, as `tokenizers` is multi-threaded."""
    dtype = token_dtype(tokenizer.vocab_size)
    for batch in _batched(chunks):
        for chunk, ids in zip(batch, tokenizer.encode([chunk.text for chunk in batch]), strict=True):
            tokens = np.asarray(ids, dtype=dtype)
            if chunk.ends and tokenizer.end is not None:
                tokens = np.append(tokens, np.asarray(tokenizer.end, dtype=dtype))
            yield tokens, len(chunk.text)


def token_dtype(vocab_size: int) -> Any:
    """The smallest of uint8, uint16 and int32 that holds every token."""
    return np.uint8 if vocab_size <= 1 << 8 else np.uint16 if vocab_size <= 1 << 16 else np.int32


def _batched(chunks: Iterable[TextChunk]) -> Iterator[list[TextChunk]]:
    batch: list[TextChunk] = []
    size = 0
    for chunk in chunks:
        batch.append(chunk)
        size += len(chunk.text)
        if size >= 4 * CHUNK_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write_tokens(stream: BinaryIO, chunks: Iterable[TextChunk], *, tokenizer: Tokenizer) -> None:
    stream.write(bytes(_HEADER_BYTES))
    total = 0
    for tokens, num_bytes in encode_chunks(chunks, tokenizer=tokenizer):
        stream.write(tokens.tobytes())
        total += num_bytes
    stream.seek(0)
    stream.write(total.to_bytes(_HEADER_BYTES, "little"))


class PackedTokens:
    """Numbered sequences of `length` tokens of an array of all tokens (N,), in memory or mapped from disk."""

    def __init__(self, tokens: Tokens, *, length: int):
        self.tokens = tokens
        self._length = length

    def __len__(self) -> int:
        """Number of sequences. Each needs one more token after it, as its last target."""
        return max(0, len(self.tokens) - 1) // self._length

    def gather(self, rows: Tensor) -> Batch:
        return next_token_batch(self.tokens[rows.numpy()[:, None] * self._length + np.arange(self._length + 1)])


def next_token_batch(windows: Tokens) -> Batch:
    """Tokens (B, T + 1) of any integer type -> `tokens` and `targets`, both (B, T) int64."""
    tokens = torch.from_numpy(windows.astype(np.int64))
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def check_sizes(*, sequence_length: int, max_val_sequences: int | None) -> None:
    if sequence_length < 1:
        raise BadInputError(f"dataset.sequence_length must be at least 1 token, not {sequence_length}")
    if max_val_sequences is not None and max_val_sequences < 1:
        raise BadInputError(f"dataset.max_val_sequences must be at least 1, or null for all, not {max_val_sequences}")
