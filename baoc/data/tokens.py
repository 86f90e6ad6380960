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

from baoc.cache import cache_folder
from baoc.data.text_files import CHUNK_BYTES, TextChunk
from baoc.errors import BadInputError, OutputError, first_line
from baoc.tracking.files import atomic_write

BPE_TRAINING_BYTES = 512 << 20  # more text hardly changes the merges, and takes minutes and gigabytes
END_OF_TEXT = "<|endoftext|>"
_END_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")
_HOW = "dataset.tokenizer must be bytes, bpe, the path of a tokenizer.json, or hub:OWNER/NAME"
_CONVERT = (
    "A SentencePiece model is read as the tokenizer.json that transformers' "
    "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes: name that file"
)

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
    return _from_file(path)


def _from_file(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Library

    try:
        tokenizer = Library.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        how = _CONVERT if path.suffix == ".model" else _HOW
        raise BadInputError(f"{path} is no tokenizer of the tokenizers library ({error}). {how}") from error
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
            f"the hub gave no tokenizer {name} ({first_line(error)}): check the name and the network, "
            "or give the path of its tokenizer.json"
        ) from error


def _trained_bpe(*, vocab_size: int, training_text: Callable[[], Iterator[TextChunk]], text_key: str) -> Tokenizer:
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < 257:
        raise BadInputError(
            f"dataset.vocab_size={vocab_size} is too small: byte-level BPE needs 257, each byte and an end token"
        )
    path = cache_path("bpe", text_key, str(vocab_size), suffix=".json")
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
        library.train_from_iterator(decoded_texts(training_text()), trainer=trainer)
        write_cache_file(path, write=lambda stream: stream.write(library.to_str().encode()))
    return _from_file(path)


def decoded_texts(chunks: Iterable[TextChunk]) -> Iterator[str]:
    for chunk in islice(chunks, BPE_TRAINING_BYTES // CHUNK_BYTES):
        yield chunk.text.decode("utf-8")


# -- the cache of trained tokenizers and token arrays: file names are hashes of what they were made from --------------


def cache_path(kind: str, *made_of: str, suffix: str) -> Path:
    """Path of the file of a `kind` that was made from `made_of`, whether it exists or not."""
    digest = hashlib.sha256("\n".join(("1", *made_of)).encode()).hexdigest()
    return cache_folder() / f"{kind}-{digest[:32]}{suffix}"


def write_cache_file(path: Path, *, write: Callable[[Any], object]) -> None:
    """Writes a file in one rename, so that no run ever reads a part of it. Raises OutputError.

    Only its user may read it: it holds the text, which may be private.
    """
    try:
        with atomic_write(path, mode=0o600) as stream:
            write(stream)
    except OutputError as error:
        raise OutputError(
            f"the token cache {path.parent} cannot be written ({getattr(error.__cause__, 'strerror', error)}): set "
            "BAOC_CACHE to a folder with room"
        ) from error
