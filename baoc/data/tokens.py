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
    vocab_size: int
    end: int | None  # the token after each document; None for none
    mask: int | None  # the token that replaces masked ones; None if the vocabulary has none
    fingerprint: str  # changes whenever the tokens of a text would change

    def encode(self, texts: Sequence[bytes]) -> Iterable[Sequence[int] | Tokens]:
        """Returns the tokens of each UTF-8 text, in order, without special tokens."""
        ...


class ByteTokenizer:
    """Each byte is a token; there is no end token."""

    vocab_size: int = 256
    end: int | None = None
    mask: int | None = None
    fingerprint: str = "bytes"

    def encode(self, texts: Sequence[bytes]) -> Iterable[Tokens]:
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]


class LibraryTokenizer:
    """A `tokenizers.Tokenizer` without special tokens, padding and truncation."""

    def __init__(self, tokenizer: Any, *, end: str | None = None):
        """`end`: the end token as text; None takes the first of _END_NAMES that the vocabulary has."""
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
    name: str, *, vocab_size: int, training_chunks: Callable[[], Iterator[TextChunk]] | None, text_key: str
) -> Tokenizer:
    """Loads the tokenizer that `dataset.tokenizer` names, or trains it for `bpe`.

    Args:
        vocab_size: of a trained tokenizer.
        training_chunks: returns the text to train on; None if it cannot be read before training, as a stream.
        text_key: identifies the training text in the cache of trained tokenizers.

    Raises:
        BadInputError: for a missing file, a file that is not a tokenizer, a missing package or an unreachable hub.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name == "bpe":
        if training_chunks is None:
            raise BadInputError("dataset.tokenizer=bpe is trained on text at hand, not on a stream: give one by path")
        return _train_bpe(vocab_size=vocab_size, training_chunks=training_chunks, text_key=text_key)
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
    from tokenizers import Tokenizer as HFTokenizer

    try:
        tokenizer = HFTokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        how = _CONVERT if path.suffix == ".model" else _HOW
        raise BadInputError(f"{path} is no tokenizer of the tokenizers library ({error}). {how}") from error
    return LibraryTokenizer(tokenizer, end=_configured_end(path.with_name("tokenizer_config.json")))


def _configured_end(path: Path) -> str | None:
    """The end token, as text, that a tokenizer_config.json names; None if it names none or cannot be read."""
    try:
        eos_token = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    return eos_token.get("content") if isinstance(eos_token, dict) else eos_token


def _from_hub(name: str) -> Tokenizer:
    from tokenizers import Tokenizer as HFTokenizer

    try:
        return LibraryTokenizer(HFTokenizer.from_pretrained(name))
    except Exception as error:  # the library raises Exception itself
        raise BadInputError(
            f"the hub gave no tokenizer {name} ({first_line(error)}): check the name and the network, "
            "or give the path of its tokenizer.json"
        ) from error


def _train_bpe(*, vocab_size: int, training_chunks: Callable[[], Iterator[TextChunk]], text_key: str) -> Tokenizer:
    """Trains byte-level BPE, or reads it from the cache if it was trained on the same text before."""
    from tokenizers import Tokenizer as HFTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < 257:
        raise BadInputError(
            f"dataset.vocab_size={vocab_size} is too small: byte-level BPE needs 257, each byte and an end token"
        )
    path = cache_path("bpe", text_key, str(vocab_size), suffix=".json")
    if not path.is_file():
        tokenizer = HFTokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
        tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
        trainer = trainers.BpeTrainer(  # pyright: ignore[reportCallIssue]
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(decoded_texts(training_chunks()), trainer=trainer)
        write_cache_file(path, write=lambda stream: stream.write(tokenizer.to_str().encode()))
    return _from_file(path)


def decoded_texts(chunks: Iterable[TextChunk]) -> Iterator[str]:
    """Yields the text of the first BPE_TRAINING_BYTES of `chunks`."""
    for chunk in islice(chunks, BPE_TRAINING_BYTES // CHUNK_BYTES):
        yield chunk.text.decode("utf-8")


# -- the cache of trained tokenizers and token arrays: file names are hashes of their inputs --------------------------


def cache_path(kind: str, *inputs: str, suffix: str) -> Path:
    """Where the file of a `kind` (`bpe`, `tokens`) that is computed from `inputs` is cached. It may not exist."""
    format_version = "1"
    digest = hashlib.sha256("\n".join((format_version, *inputs)).encode()).hexdigest()
    return cache_folder() / f"{kind}-{digest[:32]}{suffix}"


def write_cache_file(path: Path, *, write: Callable[[Any], object]) -> None:
    """Writes a file of the cache by `write` and renames it, so that no run ever reads a part of it. Raises OutputError.

    Only the user may read the file: it holds the text, which may be private.
    """
    try:
        with atomic_write(path, mode=0o600) as stream:
            write(stream)
    except OutputError as error:
        raise OutputError(
            f"the token cache {path.parent} cannot be written ({getattr(error.__cause__, 'strerror', error)}): set "
            "BAOC_CACHE to a folder with room"
        ) from error
