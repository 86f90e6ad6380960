"""Text as an array of token numbers: uint8, uint16 or int32, whichever is enough, mapped from disk when it is large."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from baoc.data.text_files import PIECE_BYTES, Piece
from baoc.data.token_cache import cached, write_whole
from baoc.data.tokens import ByteTokenizer, Tokenizer, Tokens

IN_MEMORY_BYTES = 256 << 20  # larger token arrays stay on disk
_HEADER_BYTES = 8  # before the tokens of a cached array: how many bytes of text they stand for


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """`tokens`: (N,), possibly mapped from disk; `num_bytes` of text that they stand for, end tokens for none."""

    tokens: Tokens
    num_bytes: int

    @property
    def bytes_per_token(self) -> float:
        return self.num_bytes / max(1, len(self.tokens))


def encode(pieces: Callable[[], Iterator[Piece]], *, tokenizer: Tokenizer, num_bytes: int, text_key: str) -> Encoded:
    """The tokens of `pieces()`, an end token behind each document. `num_bytes`: about how much text there is.

    From the cache where it holds them; bytes of a set that fits memory are not cached, being the text itself.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    if isinstance(tokenizer, ByteTokenizer) and num_bytes <= IN_MEMORY_BYTES:
        parts = [tokens for tokens, _ in encode_pieces(pieces(), tokenizer=tokenizer)]
        tokens = np.concatenate(parts) if parts else np.empty(0, dtype)
        return Encoded(tokens=tokens, num_bytes=len(tokens))
    path = cached("tokens", text_key, tokenizer.fingerprint, suffix=".bin")
    if not path.is_file():
        write_whole(path, write=lambda stream: _write_tokens(stream, pieces(), tokenizer=tokenizer))
    return _read_tokens(path, dtype=dtype)


def encode_pieces(pieces: Iterable[Piece], *, tokenizer: Tokenizer) -> Iterator[tuple[Tokens, int]]:
    """(tokens, bytes of text) piece by piece; the library encodes several at once, on several threads."""
    dtype = token_dtype(tokenizer.vocab_size)
    for batch in _batched(pieces):
        for piece, ids in zip(batch, tokenizer.encode([piece.text for piece in batch]), strict=True):
            tokens = np.asarray(ids, dtype=dtype)
            if piece.ends and tokenizer.end is not None:
                tokens = np.append(tokens, np.asarray(tokenizer.end, dtype=dtype))
            yield tokens, len(piece.text)


def token_dtype(vocab_size: int) -> Any:
    return np.uint8 if vocab_size <= 1 << 8 else np.uint16 if vocab_size <= 1 << 16 else np.int32


def _batched(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= 4 * PIECE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write_tokens(stream: BinaryIO, pieces: Iterable[Piece], *, tokenizer: Tokenizer) -> None:
    stream.write(bytes(_HEADER_BYTES))
    total = 0
    for tokens, num_bytes in encode_pieces(pieces, tokenizer=tokenizer):
        stream.write(tokens.tobytes())
        total += num_bytes
    stream.seek(0)
    stream.write(total.to_bytes(_HEADER_BYTES, "little"))


def _read_tokens(path: Path, *, dtype: Any) -> Encoded:
    with path.open("rb") as stream:
        num_bytes = int.from_bytes(stream.read(_HEADER_BYTES), "little")
    size = path.stat().st_size - _HEADER_BYTES
    if size > IN_MEMORY_BYTES:
        return Encoded(tokens=np.memmap(path, dtype=dtype, mode="r", offset=_HEADER_BYTES), num_bytes=num_bytes)
    return Encoded(tokens=np.fromfile(path, dtype=dtype, offset=_HEADER_BYTES), num_bytes=num_bytes)
