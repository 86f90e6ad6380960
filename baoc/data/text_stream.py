"""Streams text of the Hugging Face hub and packs it into sequences, without a copy on disk.

A thread reads and tokenizes documents ahead of training. The position after each sequence is known to the token, so
`StreamLoader` resumes at the next one.
"""

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
import torch

from baoc.data.base import DataModule, rank_and_size
from baoc.data.loader import SequentialLoader
from baoc.data.stream import StreamLoader
from baoc.data.tables import require_datasets, shard_stream
from baoc.data.text_files import TextChunk
from baoc.data.token_arrays import EncodedText, PackedTokens, check_sizes, encode_chunks, next_token_batch, token_dtype
from baoc.data.tokens import Tokenizer, Tokens, load_tokenizer
from baoc.errors import BadInputError, TrainingFailedError, first_line
from baoc.types import TextDataSpec

SHUFFLE_BLOCK = 1024  # sequences of a block that is shuffled
DOCUMENTS_PER_BATCH = 64  # tokenized at once, on several threads
_AHEAD = 64  # batches of documents that are read in advance
_VAL_SEQUENCES = 512  # for max_val_sequences=null, as a stream may have no end


def build_stream(hub: str, **options: Any) -> "StreamDataModule":
    """The DataModule of the set `hub` with configuration `hub_config`. Raises BadInputError if it is unavailable."""
    train = _open(hub, config=options["hub_config"], split=options["train_split"])
    val_split = options["val_split"]
    val = None if val_split is None else _open(hub, config=options["hub_config"], split=val_split)
    names = ("tokenizer", "sequence_length", "max_val_sequences", "text_column", "batch_size", "seed", "accumulate")
    return StreamDataModule(train, val, name=hub, **{name: options[name] for name in names})


def _open(hub: str, *, config: str | None, split: str) -> Any:
    library = require_datasets()
    try:
        return library.load_dataset(hub, config, split=split, streaming=True)
    except Exception as error:  # network, hub and library raise different kinds
        name = hub if config is None else f"{hub} ({config})"
        raise BadInputError(
            f"the hub gave no split {split} of {name}: {first_line(error)}. Check the name and the network, or give "
            "dataset.path=FOLDER with a copy of its files"
        ) from error


class StreamDataModule(DataModule):
    """`train` and `val` are streams of `datasets`. Without `val`, the first documents of `train` are held out."""

    spec: TextDataSpec

    def __init__(
        self,
        train: Any,
        val: Any | None,
        *,
        name: str,
        tokenizer: str = "bytes",
        sequence_length: int = 128,
        max_val_sequences: int | None = 512,
        text_column: str = "text",
        **batches: Any,
    ):
        super().__init__(**batches)
        check_sizes(sequence_length=sequence_length, max_val_sequences=max_val_sequences)
        self._tokenizer = load_tokenizer(tokenizer, vocab_size=0, training_text=None, text_key="")
        self._length = sequence_length
        train, val = (None if part is None else Documents(part, name=name, column=text_column) for part in (train, val))
        assert train is not None
        num_val = max_val_sequences or _VAL_SEQUENCES
        held, num_documents = _first_tokens(
            train if val is None else val, tokenizer=self._tokenizer, num_tokens=num_val * sequence_length + 1
        )
        self._train = train.skip(num_documents) if val is None else train
        self._val = PackedTokens(held.tokens, length=sequence_length)
        self._val_rows = torch.arange(min(num_val, len(self._val)))
        if len(self._val) == 0:
            raise BadInputError(f"the validation text of {name} is shorter than one sequence of {sequence_length}")
        self.spec = TextDataSpec(
            dataset=name,
            vocab_size=self._tokenizer.vocab_size,
            sequence_length=sequence_length,
            num_train=0,
            num_val=len(self._val_rows),
            bytes_per_token=held.bytes_per_token,
            mask_token=getattr(self._tokenizer, "mask", None),
        )

    def contents(self) -> tuple[str, ...]:
        """Of the validation text: the stream is told by its name and settings."""
        return (hashlib.sha256(np.ascontiguousarray(self._val.tokens).tobytes()).hexdigest(),)

    def make_train_loader(self, *, limit: int | None) -> StreamLoader:
        rank, _ = rank_and_size(self)
        return StreamLoader(
            self._open,
            make=lambda windows, _: next_token_batch(np.stack(windows)),
            batch_size=self.batch_size,
            seed=self.seed,
            accumulate=self.accumulate,
            buffer=SHUFFLE_BLOCK,
            threads=1,
            rank=rank,
        )

    def make_overfit_loader(self) -> SequentialLoader:
        windows = list(islice(self._open(0), SHUFFLE_BLOCK))
        tokens = np.concatenate([window[:-1] for window in windows] + [windows[-1][-1:]])
        return SequentialLoader(PackedTokens(tokens, length=self._length), batch_size=self.batch_size)

    def val_dataloader(self) -> SequentialLoader:
        return SequentialLoader(self._val, batch_size=self.batch_size, indices=self._val_rows)

    def _open(self, epoch: int) -> "PackedStream":
        """The same stream in every epoch; sequences are shuffled within blocks by epoch."""
        documents = self._train.for_rank(*rank_and_size(self))
        return PackedStream(documents, tokenizer=self._tokenizer, length=self._length)


class Documents:
    """The texts of a stream, a few at a time, with the position after them."""

    def __init__(self, stream: Any, *, name: str, column: str, skipped: bool = False):
        self._stream = stream
        self._name = name
        self._column = column
        self._skipped = skipped  # some at its start

    def batches(self, state: Any | None) -> Iterator[tuple[list[TextChunk], Any]]:
        """(documents, the library's state after them) from `state` on, read from a copy of the stream.

        Raises BadInputError for a missing column, TrainingFailedError if reading fails.
        """
        stream = require_datasets().concatenate_datasets([self._stream])
        if state is not None:
            stream.load_state_dict(state)
        rows = self._read(iter(stream))
        while texts := [self._text(row) for row in islice(rows, DOCUMENTS_PER_BATCH)]:
            yield [TextChunk(text=text, ends=True) for text in texts], stream.state_dict()

    def skip(self, num_documents: int) -> "Documents":
        return Documents(self._stream.skip(num_documents), name=self._name, column=self._column, skipped=True)

    def for_rank(self, rank: int, num_ranks: int) -> "Documents":
        part = shard_stream(self._stream, rank=rank, num_ranks=num_ranks, skipped=self._skipped)
        return Documents(part, name=self._name, column=self._column)

    def _read(self, rows: Iterator[Any]) -> Iterator[Any]:
        while True:
            try:
                row = next(rows, None)
            except Exception as error:
                raise TrainingFailedError(
                    f"the stream of {self._name} broke ({first_line(error)}): resume=auto goes on from the last "
                    "checkpoint"
                ) from error
            if row is None:
                return
            yield row

    def _text(self, row: Mapping[str, Any]) -> bytes:
        if not isinstance(row.get(self._column), str):
            raise BadInputError(
                f"{self._name} has no column {self._column!r} of text; name it with dataset.text_column={'|'.join(row)}"
            )
        return row[self._column].encode("utf-8", errors="replace")


class PackedStream:
    """What a `StreamLoader` reads: documents packed into sequences of (T + 1,) tokens, which overlap by one token.

    Its state is `{"documents": the library's state before a batch of documents, "skip": number of tokens from there on
    that belong to earlier sequences}`.
    """

    def __init__(self, documents: Documents, *, tokenizer: Tokenizer, length: int):
        self._documents = documents
        self._tokenizer = tokenizer
        self._length = length
        self._place: dict[str, Any] = {"documents": None, "skip": 0}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._place)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._place = dict(state_dict)

    def __iter__(self) -> Iterator[Tokens]:
        for window, place in _ahead(self._windows()):
            self._place = place
            yield window

    def _windows(self) -> Iterator[list[tuple[Tokens, dict[str, Any]]]]:
        """The sequences that each batch of documents completes, with the position after each sequence."""
        length, state = self._length, self._place["documents"]
        held = np.empty(0, token_dtype(self._tokenizer.vocab_size))
        # Positions count tokens from the first one that is used; the first batch may begin before it.
        begin, end = 0, -self._place["skip"]
        batches: deque[tuple[Any, int]] = deque()  # the library's state before a batch, position of its first token
        for documents, after in self._documents.batches(state):
            batches.append((state, end))
            new = np.concatenate([tokens for tokens, _ in encode_chunks(documents, tokenizer=self._tokenizer)])
            held = np.concatenate([held, new[max(0, -end) :]])
            end, state = end + len(new), after
            windows: list[tuple[Tokens, dict[str, Any]]] = []
            for start in range(0, len(held) - length, length):
                place = begin + start + length
                while len(batches) > 1 and batches[1][1] <= place:
                    batches.popleft()
                before, first = batches[0]
                windows.append((held[start : start + length + 1], {"documents": before, "skip": place - first}))
            begin, held = begin + len(windows) * length, held[len(windows) * length :]
            yield windows


def _ahead(batches: Iterator[list[Any]]) -> Iterator[Any]:
    """The items of all `batches` in order, read ahead by a thread."""
    with ThreadPoolExecutor(1) as thread:
        waiting: deque[Future[list[Any] | None]] = deque()
        try:
            waiting.extend(thread.submit(next, batches, None) for _ in range(_AHEAD))
            while (batch := waiting.popleft().result()) is not None:
                waiting.append(thread.submit(next, batches, None))
                yield from batch
        finally:
            for future in waiting:
                future.cancel()


def _first_tokens(documents: Documents, *, tokenizer: Tokenizer, num_tokens: int) -> tuple[EncodedText, int]:
    """(at least `num_tokens` tokens from the beginning, number of documents they come from)."""
    parts: list[Tokens] = []
    num_bytes = count = 0
    for batch, _ in documents.batches(None):
        for tokens, size in encode_chunks(batch, tokenizer=tokenizer):
            parts.append(tokens)
            num_bytes, count = num_bytes + size, count + len(tokens)
        if count >= num_tokens:
            break
    tokens = np.concatenate(parts) if parts else np.empty(0, token_dtype(tokenizer.vocab_size))
    return EncodedText(tokens=tokens, num_bytes=num_bytes), len(parts)
