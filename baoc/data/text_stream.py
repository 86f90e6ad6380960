"""Streams text of the Hugging Face hub and packs it into sequences, without a copy on disk.

A thread reads and tokenizes documents ahead of training. Each sequence comes with the position after it, exact to the
token, so `StreamLoader` resumes at the next sequence.
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

SHUFFLE_BLOCK = 1024  # sequences that are shuffled together
DOCUMENTS_PER_BATCH = 64  # tokenized at once, on several threads
_PREFETCHED_BATCHES = 64  # of documents
_DEFAULT_VAL_SEQUENCES = 512  # for max_val_sequences=null, because a stream may have no end


def build_stream(hub: str, **options: Any) -> "StreamDataModule":
    """Builds the DataModule of the hub's set `hub`. Raises BadInputError if it is unavailable."""
    train = _open_hub(hub, config=options["hub_config"], split=options["train_split"])
    val_split = options["val_split"]
    val = None if val_split is None else _open_hub(hub, config=options["hub_config"], split=val_split)
    names = ("tokenizer", "sequence_length", "max_val_sequences", "text_column", "batch_size", "seed", "accumulate")
    return StreamDataModule(train, val, name=hub, **{name: options[name] for name in names})


def _open_hub(hub: str, *, config: str | None, split: str) -> Any:
    datasets = require_datasets()
    try:
        return datasets.load_dataset(hub, config, split=split, streaming=True)
    except Exception as error:  # network, hub and library raise different kinds
        name = hub if config is None else f"{hub} ({config})"
        raise BadInputError(
            f"the hub gave no split {split} of {name}: {first_line(error)}. Check the name and the network, or give "
            "dataset.path=FOLDER with a copy of its files"
        ) from error


class StreamDataModule(DataModule):
    """`train` and `val` are streams of `datasets`. Without `val`, the first documents of `train` are held out."""

    spec: TextDataSpec
    ignored_options = ("val_fraction", "pattern")

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
        self._tokenizer = load_tokenizer(tokenizer, vocab_size=0, training_chunks=None, text_key="")
        self._length = sequence_length
        self._train = Documents(train, name=name, column=text_column)
        val_documents = self._train if val is None else Documents(val, name=name, column=text_column)
        num_val = max_val_sequences or _DEFAULT_VAL_SEQUENCES
        val_text, num_documents = _first_tokens(
            val_documents, tokenizer=self._tokenizer, num_tokens=num_val * sequence_length + 1
        )
        if val is None:
            self._train = self._train.skip(num_documents)
        self._val = PackedTokens(val_text.tokens, length=sequence_length)
        self._val_rows = torch.arange(min(num_val, len(self._val)))
        if len(self._val) == 0:
            raise BadInputError(f"the validation text of {name} is shorter than one sequence of {sequence_length}")
        self.spec = TextDataSpec(
            dataset=name,
            vocab_size=self._tokenizer.vocab_size,
            sequence_length=sequence_length,
            num_train=0,
            num_val=len(self._val_rows),
            bytes_per_token=val_text.bytes_per_token,
            mask_token=self._tokenizer.mask,
        )

    def contents(self) -> tuple[str, ...]:
        """The hash of the validation text. Name and settings identify the training stream."""
        return (hashlib.sha256(np.ascontiguousarray(self._val.tokens).tobytes()).hexdigest(),)

    def make_train_loader(self, *, limit: int | None) -> StreamLoader:
        rank, _ = rank_and_size(self)
        return StreamLoader(
            self._open_stream,
            make=lambda windows, _: next_token_batch(np.stack(windows)),
            batch_size=self.batch_size,
            seed=self.seed,
            accumulate=self.accumulate,
            buffer=SHUFFLE_BLOCK,
            threads=1,
            rank=rank,
        )

    def make_overfit_loader(self) -> SequentialLoader:
        windows = list(islice(self._open_stream(0), SHUFFLE_BLOCK))
        tokens = np.concatenate([window[:-1] for window in windows] + [windows[-1][-1:]])
        return SequentialLoader(PackedTokens(tokens, length=self._length), batch_size=self.batch_size)

    def val_dataloader(self) -> SequentialLoader:
        return SequentialLoader(self._val, batch_size=self.batch_size, indices=self._val_rows)

    def _open_stream(self, epoch: int) -> "PackedStream":
        """The same stream in every epoch. The loader shuffles the sequences of a block differently in each epoch."""
        documents = self._train.for_rank(*rank_and_size(self))
        return PackedStream(documents, tokenizer=self._tokenizer, length=self._length)


class Documents:
    """The texts of a stream of `datasets`, read in batches, with the position after each batch."""

    def __init__(self, stream: Any, *, name: str, column: str, skipped: bool = False):
        self._stream = stream
        self._name = name
        self._column = column
        self._skipped = skipped  # whether the stream leaves out samples at its start

    def batches(self, state: Any | None) -> Iterator[tuple[list[TextChunk], Any]]:
        """Yields (documents, the stream's state after them), from `state` on. Reads a copy of the stream.

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
        shard = shard_stream(self._stream, rank=rank, num_ranks=num_ranks, skipped=self._skipped)
        return Documents(shard, name=self._name, column=self._column)

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
    """Documents packed into sequences of (T + 1,) tokens, which overlap by one token; a stream for `StreamLoader`.

    Its state is `{"documents": state of the stream of `datasets` before a batch of documents, "skip": number of tokens
    from there on that belong to earlier sequences}`.
    """

    def __init__(self, documents: Documents, *, tokenizer: Tokenizer, length: int):
        self._documents = documents
        self._tokenizer = tokenizer
        self._length = length
        self._position: dict[str, Any] = {"documents": None, "skip": 0}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._position)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._position = dict(state_dict)

    def __iter__(self) -> Iterator[Tokens]:
        for window, position in _prefetch(self._windows()):
            self._position = position
            yield window

    def _windows(self) -> Iterator[list[tuple[Tokens, dict[str, Any]]]]:
        """Yields, for each batch of documents, the sequences that it completes, each with the position after it."""
        length, state = self._length, self._position["documents"]
        tokens = np.empty(0, token_dtype(self._tokenizer.vocab_size))  # read, and not in a sequence yet
        # Offsets count tokens from the first one that is used; the first batch may begin before it.
        tokens_start, end = 0, -self._position["skip"]
        batches: deque[tuple[Any, int]] = deque()  # (state before a batch of documents, offset of its first token)
        for documents, state_after in self._documents.batches(state):
            batches.append((state, end))
            new = np.concatenate([tokens for tokens, _ in encode_chunks(documents, tokenizer=self._tokenizer)])
            tokens = np.concatenate([tokens, new[max(0, -end) :]])
            end, state = end + len(new), state_after
            windows: list[tuple[Tokens, dict[str, Any]]] = []
            for start in range(0, len(tokens) - length, length):
                offset = tokens_start + start + length  # of the next sequence
                while len(batches) > 1 and batches[1][1] <= offset:
                    batches.popleft()
                state_before, first_offset = batches[0]
                position = {"documents": state_before, "skip": offset - first_offset}
                windows.append((tokens[start : start + length + 1], position))
            tokens_start += len(windows) * length
            tokens = tokens[len(windows) * length :]
            yield windows


def _prefetch(batches: Iterator[list[Any]]) -> Iterator[Any]:
    """Yields the items of all `batches` in order; a thread reads _PREFETCHED_BATCHES in advance."""
    with ThreadPoolExecutor(1) as thread:
        pending: deque[Future[list[Any] | None]] = deque()
        try:
            pending.extend(thread.submit(next, batches, None) for _ in range(_PREFETCHED_BATCHES))
            while (batch := pending.popleft().result()) is not None:
                pending.append(thread.submit(next, batches, None))
                yield from batch
        finally:
            for future in pending:
                future.cancel()


def _first_tokens(documents: Documents, *, tokenizer: Tokenizer, num_tokens: int) -> tuple[EncodedText, int]:
    """Returns (at least `num_tokens` tokens from the beginning, if there are so many; number of their documents)."""
    by_document: list[Tokens] = []
    num_bytes = num_read = 0
    for batch, _ in documents.batches(None):
        for tokens, size in encode_chunks(batch, tokenizer=tokenizer):
            by_document.append(tokens)
            num_bytes, num_read = num_bytes + size, num_read + len(tokens)
        if num_read >= num_tokens:
            break
    tokens = np.concatenate(by_document) if by_document else np.empty(0, token_dtype(tokenizer.vocab_size))
    return EncodedText(tokens=tokens, num_bytes=num_bytes), len(by_document)
