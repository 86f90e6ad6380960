"""Tokenizers: bytes, a tokenizer file, a tokenizer of the hub, or byte-level BPE trained on the training text.

A trained tokenizer is cached by a hash of its training text.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from baoc.data.text_files import CHUNK_BYTES, TextChunk
from baoc.data.token_cache import cached, write_whole
from baoc.errors import BadInputError

BPE_TRAINING_BYTES = 512 << 20  # more text hardly changes the merges, and takes minutes and gigabytes
END_OF_TEXT = "<|endoftext|>"
_END_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")
_HOW = "dataset.tokenizer must be bytes, bpe, a tokenizer.json or SentencePiece .model by its path, or hub:OWNER/NAME"

Tokens = NDArray[Any]


class Tokenizer(Protocol):
    """`end`: the token after each document, or None. `fingerprint`: changes whenever `encode` would."""

    vocab_size: int
    end: int | None
    fingerprint: str

    def encode(self, texts: Sequence[bytes]) -> Iterable[Sequence[int] | Tokens]: ...


class ByteTokenizer:
    """Each byte is a token; there is no end token."""

    vocab_size: int = 256
    end: int | None = None
    fingerprint: str = "bytes"

    def encode(self, texts: Sequence[bytes]) -> Iterable[Tokens]:
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]


class LibraryTokenizer:
    """A `tokenizers.Tokenizer` without special tokens, padding and truncation."""

    def __init__(self, tokenizer: Any, *, end: str | None = None):
        """`end`: the name of the end token; None searches for the usual names."""
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        names = _END_NAMES if end is None else (end, *_END_NAMES)
        self.end = next((vocabulary[name] for name in names if name in vocabulary), None)
        self.mask = next((vocabulary[name] for name in ("[MASK]", "<mask>") if name in vocabulary), None)
        self.fingerprint = f"{hashlib.sha256(tokenizer.to_str().encode()).hexdigest()}-{self.end}"

    def encode(self, texts: Sequence[bytes]) -> Iterable[Sequence[int]]:
        batch = [text.decode("utf-8") for text in texts]
        return (encoding.ids for encoding in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False))


class SentencePieceTokenizer:
    """A SentencePiece model, read by the package sentencepiece."""

    def __init__(self, processor: Any, *, content: bytes):
        self._processor = processor
        self.vocab_size = int(processor.vocab_size())
        end = int(processor.eos_id())
        self.end = end if end >= 0 else None
        self.fingerprint = f"{hashlib.sha256(content).hexdigest()}-{self.end}"

    def encode(self, texts: Sequence[bytes]) -> Iterable[Sequence[int]]:
        return self._processor.encode([text.decode("utf-8") for text in texts])


# -- by name ----------------------------------------------------------------------------------------------------------


def load_tokenizer(
    name: str, *, vocab_size: int, training_text: Callable[[], Iterator[TextChunk]] | None, text_key: str
) -> Tokenizer:
    """The tokenizer that `dataset.tokenizer` names. `vocab_size`, `training_text` and `text_key` are for `bpe` only.

    Raises BadInputError for a missing file, a file that is not a tokenizer, a missing package or an unreachable hub.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name == "bpe":
        if training_text is None:
            raise BadInputError("dataset.tokenizer=bpe is trained on text at hand, not on a stream: give one by path")
        return _trained_bpe(vocab_size=vocab_size, training_text=training_text, text_key=text_key)
    if name.startswith("hub:"):
        return _from_hub(name.removeprefix("hub:"))
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        hint = f"; is dataset.tokenizer=hub:{name} meant?" if "/" in name and not path.is_absolute() else ""
        raise BadInputError(f"dataset.tokenizer={name}: there is no file {path}{hint}. {_HOW}")
    return _from_sentencepiece(path) if path.suffix == ".model" else _from_file(path)


def _from_file(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Library

    try:
        tokenizer = Library.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise BadInputError(f"{path} is no tokenizer of the tokenizers library ({error}). {_HOW}") from error
    return LibraryTokenizer(tokenizer, end=_configured_end(path.with_name("tokenizer_config.json")))


def _configured_end(path: Path) -> str | None:
    """The end token that a tokenizer_config.json beside the tokenizer names."""
    try:
        end = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    return end.get("content") if isinstance(end, dict) else end


def _from_hub(name: str) -> Tokenizer:
    from tokenizers import Tokenizer as Library

    try:
        return LibraryTokenizer(Library.from_pretrained(name))
    except Exception as error:  # the library raises Exception itself
        raise BadInputError(
            f"the hub gave no tokenizer {name} ({str(error).splitlines()[0]}): check the name and the network, "
            "or give the path of its tokenizer.json"
        ) from error


def _from_sentencepiece(path: Path) -> Tokenizer:
    try:
        from sentencepiece import SentencePieceProcessor  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise BadInputError(
            f"{path} needs the package sentencepiece: pip install sentencepiece, or give a tokenizer.json instead"
        ) from error
    content = path.read_bytes()
    try:
        return SentencePieceTokenizer(SentencePieceProcessor(model_proto=content), content=content)
    except RuntimeError as error:
        raise BadInputError(f"{path} is no SentencePiece model ({error}). {_HOW}") from error


def _trained_bpe(*, vocab_size: int, training_text: Callable[[], Iterator[TextChunk]], text_key: str) -> Tokenizer:
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < 257:
        raise BadInputError(
            f"dataset.vocab_size={vocab_size} is too small: byte-level BPE needs 257, each byte and an end token"
        )
    path = cached("bpe", text_key, str(vocab_size), suffix=".json")
    if not path.is_file():
        library = Library(models.BPE())
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
        library.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
        trainer = trainers.BpeTrainer(  # pyright: ignore[reportCallIssue]
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        library.train_from_iterator(training_texts(training_text()), trainer=trainer)
        write_whole(path, write=lambda stream: stream.write(library.to_str().encode()))
    return _from_file(path)


def training_texts(chunks: Iterable[TextChunk]) -> Iterator[str]:
    for chunk in islice(chunks, BPE_TRAINING_BYTES // CHUNK_BYTES):
        yield chunk.text.decode("utf-8")
