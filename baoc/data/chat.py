"""Conversations in JSON lines, packed into rows of equal length; only the answers are learned.

Batches are `{"tokens", "targets", "positions"}`, int64 (B, T). Targets are the tokens shifted by one; those outside
of answers are IGNORE_INDEX. Positions begin at 0 with each conversation, so that attention can tell them apart.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from baoc.data.base import MapStyleDataModule, check_val_fraction, random_split
from baoc.data.sources import TensorSource, evenly_spaced
from baoc.data.splits import visible_files
from baoc.data.text_files import JSON_ENDINGS, json_lines
from baoc.data.token_arrays import check_sizes
from baoc.errors import BadInputError
from baoc.models.chat import ChatTokenizer, Conversation
from baoc.types import IGNORE_INDEX, TextDataSpec

log = logging.getLogger(__name__)


class ChatDataModule(MapStyleDataModule):
    """Conversations of .jsonl files. `val_fraction` of them, drawn by `split_seed`, is the validation split.

    Validation reads `max_val_sequences` evenly spaced rows of it; None reads all.
    """

    spec: TextDataSpec

    def __init__(
        self,
        path: str,
        *,
        tokenizer: str,
        sequence_length: int,
        val_fraction: float,
        split_seed: int,
        max_val_sequences: int | None,
        **batches: Any,
    ):
        super().__init__(**batches)
        check_sizes(sequence_length=sequence_length, max_val_sequences=max_val_sequences)
        check_val_fraction(val_fraction)
        files = _list_files(Path(path).expanduser())  # first, so that a wrong path is reported before the tokenizer
        chat_tokenizer = ChatTokenizer(tokenizer)
        conversations = [chat_tokenizer.encode(sample, where=where) for sample, where in _read_samples(files)]
        num_read = len(conversations)
        if num_read < 2:
            raise BadInputError(
                f"dataset.path={path} holds {num_read} conversation: at least 2 are needed, one to validate"
            )
        num_cut = sum(len(conversation.tokens) > sequence_length + 1 for conversation in conversations)
        if num_cut:
            log.warning("%d of %d conversations are cut at %d tokens", num_cut, num_read, sequence_length + 1)
        train_rows, val_rows = random_split(num_read, val_fraction=val_fraction, split_seed=split_seed)
        val_conversations = [conversations[row] for row in val_rows.tolist()]
        self.train_source = _pack([conversations[row] for row in train_rows.tolist()], length=sequence_length)
        self.val_source = _pack(val_conversations, length=sequence_length)
        for split, source in (("training", self.train_source), ("validation", self.val_source)):
            if not len(source):
                raise BadInputError(
                    f"the {split} part of {path} has no answer within {sequence_length} tokens: give a larger "
                    "dataset.sequence_length, or more conversations"
                )
        self.val_rows = evenly_spaced(len(self.val_source), at_most=max_val_sequences)
        num_answer_bytes = sum(conversation.num_bytes for conversation in val_conversations)
        num_answer_tokens = sum(sum(conversation.answer_mask) for conversation in val_conversations)
        self.spec = TextDataSpec(
            dataset=Path(path).stem,
            vocab_size=chat_tokenizer.vocab_size,
            sequence_length=sequence_length,
            num_train=len(self.train_source),
            num_val=len(self.val_rows),
            bytes_per_token=max(1, num_answer_bytes) / max(1, num_answer_tokens),
        )


def _list_files(path: Path) -> list[Path]:
    """The files of JSON lines at `path`. A folder's .json files count only if it has no other ones."""
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.is_file() and file.name.lower().endswith(JSON_ENDINGS)]
        visible = visible_files(path, files)
        jsonl = [file for file in visible if not file.name.lower().endswith((".json", ".json.gz"))]
        json = [file.relative_to(path) for file in visible if file not in jsonl]
        if jsonl and json:  # such as dataset_infos.json, tokenizer.json, package.json
            log.warning("%s: %d .json files beside JSON lines are left out, such as %s", path, len(json), json[0])
        if visible:
            return jsonl or visible
        raise BadInputError(f"dataset.path={path} holds no JSON lines: give FILE.jsonl, or a folder of such files")
    if not path.is_file():
        raise BadInputError(f"dataset.path={path} does not exist: give FILE.jsonl, or a folder of such files")
    return [path]


def _read_samples(files: Sequence[Path]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yields (object, "FILE, line N") of each line. Raises BadInputError for a line that is no object."""
    for file in files:
        for sample, where in json_lines(file):
            if not isinstance(sample, Mapping):
                raise BadInputError(f"{where} is a {type(sample).__name__}: it must be an object with `messages`")
            yield sample, where


def _pack(conversations: list[Conversation], *, length: int) -> TensorSource:
    """Packs conversations into rows of `length` tokens, in order, each within one row; the rest of a row is padding.

    Conversations are cut at `length` + 1 tokens, and left out if no answer begins before that.
    """
    rows: list[list[Conversation]] = []
    free = 0  # tokens of the last row
    for conversation in conversations:
        size = min(len(conversation.tokens) - 1, length)
        if size < 1 or not any(conversation.answer_mask[1 : size + 1]):
            continue
        if size > free:
            rows.append([])
            free = length
        rows[-1].append(conversation)
        free -= size
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    targets = torch.full((len(rows), length), IGNORE_INDEX, dtype=torch.int64)
    positions = torch.zeros(len(rows), length, dtype=torch.int64)
    for row, row_conversations in enumerate(rows):
        start = 0
        for conversation in row_conversations:
            size = min(len(conversation.tokens) - 1, length)
            window = torch.tensor(list(conversation.tokens[: size + 1]))
            is_answer = torch.tensor(list(conversation.answer_mask[1 : size + 1]))
            columns = slice(start, start + size)
            tokens[row, columns] = window[:-1]
            targets[row, columns] = window[1:].where(is_answer, torch.tensor(IGNORE_INDEX))
            positions[row, columns] = torch.arange(size)
            start += size
        positions[row, start:] = torch.arange(length - start)
    return TensorSource({"tokens": tokens, "targets": targets, "positions": positions})
