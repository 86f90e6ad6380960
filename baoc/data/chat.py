"""Conversations in JSON lines, packed into rows of one length; only the answers are learned.

Batches are `{"tokens", "targets", "positions"}`, int64 (B, T). Targets are the tokens shifted by one; those outside
of answers are IGNORE_INDEX. Positions begin at 0 with each conversation, by which attention keeps them apart.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baoc.data.base import MapStyleDataModule, check_val_fraction, random_split
from baoc.data.sources import TensorSource
from baoc.data.splits import visible_files
from baoc.data.text import evenly_spaced
from baoc.data.text_files import JSON, json_lines
from baoc.data.token_arrays import check_sizes
from baoc.errors import BadInputError
from baoc.models.chat import ChatTokenizer, Conversation
from baoc.types import TextDataSpec

IGNORE_INDEX = -100  # of targets: what torch's cross-entropy leaves out
log = logging.getLogger(__name__)


class ChatDataModule(MapStyleDataModule):
    """The last `val_fraction` of the conversations, in an order drawn by `split_seed`, is the validation part."""

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
        files = _files(Path(path).expanduser())  # a wrong path is told before a tokenizer is looked for
        library = ChatTokenizer(tokenizer)
        held = [library.encode(sample, where=where) for sample, where in _samples(files)]
        if len(held) < 2:
            raise BadInputError(
                f"dataset.path={path} holds {len(held)} conversation: at least 2 are needed, one to validate"
            )
        rows = random_split(len(held), val_fraction=val_fraction, split_seed=split_seed)
        parts = [[held[at] for at in part.tolist()] for part in rows]
        long = sum(len(one.tokens) > sequence_length + 1 for one in held)
        if long:
            log.warning("%d of %d conversations are cut at %d tokens", long, len(held), sequence_length + 1)
        self.train_source, self.val_source = (_packed(part, length=sequence_length) for part in parts)
        for name, source in (("training", self.train_source), ("validation", self.val_source)):
            if not len(source):
                raise BadInputError(
                    f"the {name} part of {path} has no answer within {sequence_length} tokens: give a larger "
                    "dataset.sequence_length, or more conversations"
                )
        self.val_rows = evenly_spaced(len(self.val_source), at_most=max_val_sequences)
        answered = sum(sum(one.answer_mask) for one in parts[1])
        self.spec = TextDataSpec(
            dataset=Path(path).stem,
            vocab_size=library.vocab_size,
            sequence_length=sequence_length,
            num_train=len(self.train_source),
            num_val=len(self.val_rows),
            bytes_per_token=max(1, sum(one.num_bytes for one in parts[1])) / max(1, answered),
        )


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.is_file() and file.name.lower().endswith(JSON)]
        found = visible_files(path, files)
        lines = [file for file in found if not file.name.lower().endswith((".json", ".json.gz"))]
        left = [file.relative_to(path) for file in found if file not in lines]
        if lines and left:  # such as dataset_infos.json, tokenizer.json, package.json
            log.warning("%s: %d .json files beside JSON lines are left out, such as %s", path, len(left), left[0])
        if found:
            return lines or found
        raise BadInputError(f"dataset.path={path} holds no JSON lines: give FILE.jsonl, or a folder of such files")
    if not path.is_file():
        raise BadInputError(f"dataset.path={path} does not exist: give FILE.jsonl, or a folder of such files")
    return [path]


def _samples(files: Sequence[Path]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The objects of files of JSON lines, and where each is."""
    for file in files:
        for sample, where in json_lines(file):
            if not isinstance(sample, Mapping):
                raise BadInputError(f"{where} is a {type(sample).__name__}: it must be an object with `messages`")
            yield sample, where


def _packed(conversations: list[Conversation], *, length: int) -> TensorSource:
    """Rows of `length` tokens: conversations one after another, each within one row; what is left is padding."""
    rows: list[list[Conversation]] = []
    room = 0
    for one in conversations:
        size = min(len(one.tokens) - 1, length)
        if size < 1 or not any(one.answer_mask[1 : size + 1]):
            continue
        if size > room:
            rows.append([])
            room = length
        rows[-1].append(one)
        room -= size
    made: dict[str, Tensor] = {
        "tokens": torch.zeros(len(rows), length, dtype=torch.int64),
        "targets": torch.full((len(rows), length), IGNORE_INDEX, dtype=torch.int64),
        "positions": torch.zeros(len(rows), length, dtype=torch.int64),
    }
    for row, members in enumerate(rows):
        start = 0
        for one in members:
            size = min(len(one.tokens) - 1, length)
            tokens = torch.tensor(list(one.tokens[: size + 1]))
            learned = torch.tensor(list(one.answer_mask[1 : size + 1]))
            part = slice(start, start + size)
            made["tokens"][row, part] = tokens[:-1]
            made["targets"][row, part] = tokens[1:].where(learned, torch.tensor(IGNORE_INDEX))
            made["positions"][row, part] = torch.arange(size)
            start += size
        made["positions"][row, start:] = torch.arange(length - start)
    return TensorSource(made)
