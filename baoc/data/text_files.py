"""Reads text files as a stream of chunks: plain text, JSON lines (also gzipped, as C4 is distributed) and parquet.

A chunk is at most CHUNK_BYTES of UTF-8 and never ends within a character, so memory does not grow with the set.
"""

import codecs
import gzip
import hashlib
import json
import logging
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baoc.data.splits import is_hidden
from baoc.data.tables import require_datasets
from baoc.errors import BadInputError, first_line

log = logging.getLogger(__name__)
CHUNK_BYTES = 1 << 20
_READ_ERRORS = (OSError, EOFError, zlib.error)  # of the file system, or of the content of a gzip file
_TEXT_ENDINGS = (".txt", ".text", ".md", ".txt.gz", ".text.gz", ".md.gz")
JSON_ENDINGS = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")
_PARQUET_ENDINGS = (".parquet",)
_ARCHIVE_ENDINGS = (".tar.gz", ".tgz", ".zip", ".tar", ".7z", ".rar", ".xz", ".bz2", ".zst", ".lz4")
_HOW = f"give a text file in UTF-8, a folder of them ({', '.join(_TEXT_ENDINGS)}), JSON lines or parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextChunk:
    """A part of a document. `ends`: it is the last part."""

    text: bytes
    ends: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFiles:
    """The files of a set, in order. `chunks` reads them; BadInputError names an unreadable file."""

    name: str
    files: tuple[Path, ...]
    text_column: str = "text"

    def chunks(self) -> Iterator[TextChunk]:
        for file in self.files:
            name = file.name.lower()
            if name.endswith(_PARQUET_ENDINGS):
                documents = _parquet_documents(file, column=self.text_column)
            elif name.endswith(JSON_ENDINGS):
                documents = (_text_of(row, column=self.text_column, where=where) for row, where in json_lines(file))
            else:
                yield from _plain_text(file)
                continue
            for document in filter(None, documents):
                # Replaced are lone surrogates, which JSON can escape and UTF-8 cannot encode.
                yield from _split_document(document.encode("utf-8", errors="replace"))


@dataclass(frozen=True, slots=True, kw_only=True)
class InMemoryText(TextFiles):
    files: tuple[Path, ...] = ()
    text: bytes = field(repr=False)

    def chunks(self) -> Iterator[TextChunk]:
        yield from _split_document(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Size and hashes of a text: `sha256` of its bytes, `key` of its bytes and the ends of its documents."""

    num_bytes: int
    sha256: str
    key: str


def find_text(path: str | Path, *, pattern: str | None = None, text_column: str = "text") -> TextFiles:
    """Finds the text files at `path`: a file, or a folder and its subfolders without hidden files.

    `pattern`: a glob for names of files, instead of the known endings. Raises BadInputError for a path without text.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise BadInputError(f"dataset.path={path} does not exist: {_HOW}")
    if path.is_file():
        if (ending := _ending(path)) in _ARCHIVE_ENDINGS:
            raise BadInputError(f"dataset.path={path} is packed: {_unpack_advice(ending)}; {_HOW}")
        if path.suffix.lower() in (".csv", ".tsv"):
            log.warning("%s is read as plain text, columns and all: JSON lines and parquet have a text column", path)
        return TextFiles(name=path.name.split(".")[0] or path.name, files=(path,), text_column=text_column)
    matches = sorted((file.relative_to(path) for file in path.rglob(pattern or "*")), key=lambda file: file.as_posix())
    files = [path / file for file in matches if not is_hidden(file) and (path / file).is_file()]
    endings = _TEXT_ENDINGS + JSON_ENDINGS + _PARQUET_ENDINGS
    text_files = files if pattern else [file for file in files if file.name.lower().endswith(endings)]
    other_files = set(files) - set(text_files)
    other_endings = sorted({_ending(file) for file in other_files})
    if not text_files:
        what = f"holds no file that matches {pattern!r}" if pattern else "holds no text"
        others = f", only {', '.join(other_endings[:8])}" if other_endings else ""
        if archive := next((ending for ending in other_endings if ending in _ARCHIVE_ENDINGS), None):
            others += f": {_unpack_advice(archive)}"
        elif other_endings:
            others += f": dataset.pattern='*{other_endings[0]}' reads those as text"
        raise BadInputError(f"dataset.path={path} {what}{others}; {_HOW}")
    if archive := next((file for file in text_files if _ending(file) in _ARCHIVE_ENDINGS), None):
        raise BadInputError(
            f"dataset.pattern={pattern} takes {archive}, which is packed: {_unpack_advice(_ending(archive))}, or give "
            "a pattern that leaves it out"
        )
    if other_files:
        shown = ", ".join(other_endings[:8])
        log.warning("%s: %d files that are no text by their endings (%s) are left out", path, len(other_files), shown)
    return TextFiles(name=path.resolve().name, files=tuple(text_files), text_column=text_column)


def _ending(file: Path) -> str:
    """The ending of an archive in lower case, such as .tar.gz; else the file's suffix; its name if it has none."""
    return next((ending for ending in _ARCHIVE_ENDINGS if file.name.lower().endswith(ending)), file.suffix or file.name)


def _unpack_advice(ending: str) -> str:
    return f"unpack {ending} files first, of compressed ones .gz alone is read"


def hash_text(source: TextFiles) -> Content:
    """Reads all text once and hashes it. Raises BadInputError if there is none."""
    content, boundaries, num_bytes = hashlib.sha256(), hashlib.sha256(), 0
    for chunk in source.chunks():
        content.update(chunk.text)
        boundaries.update(f"{len(chunk.text)}:{chunk.ends};".encode())
        num_bytes += len(chunk.text)
    if num_bytes == 0:
        files = source.files
        what = str(files[0]) if len(files) == 1 else f"the text of {len(files)} files, {files[0]} to {files[-1].name},"
        raise BadInputError(f"{what} is empty: {_HOW}")
    boundaries.update(content.digest())
    return Content(num_bytes=num_bytes, sha256=content.hexdigest(), key=boundaries.hexdigest())


def byte_range(chunks: Iterable[TextChunk], *, start: int = 0, end: int = sys.maxsize) -> Iterator[TextChunk]:
    """Yields the text from byte `start` to byte `end`. A bound within a character moves to the next character."""
    offset = 0  # of the chunk
    for chunk in chunks:
        low, high = (_next_character(chunk.text, bound - offset) for bound in (start, end))
        if low < high:
            yield TextChunk(text=chunk.text[low:high], ends=chunk.ends and high == len(chunk.text))
        offset += len(chunk.text)
        if offset >= end:
            return


def _next_character(text: bytes, offset: int) -> int:
    """The first offset from `offset` on where a UTF-8 character of `text` begins, or the end of `text`."""
    offset = min(max(offset, 0), len(text))
    while offset < len(text) and text[offset] & 0xC0 == 0x80:  # a continuation byte
        offset += 1
    return offset


# -- kinds of files ---------------------------------------------------------------------------------------------------


def _plain_text(file: Path) -> Iterator[TextChunk]:
    """Yields the file as one document. Chunks end with a line where possible."""
    decoder = codecs.getincrementaldecoder("utf-8")()  # checks the text; what it returns is not used
    rest, num_read = b"", 0  # the text after the last chunk; bytes
    with _open(file) as stream:
        while True:
            try:
                new: bytes = stream.read(CHUNK_BYTES)
            except _READ_ERRORS as error:
                raise BadInputError(f"{file} cannot be read after {num_read} bytes: {error}") from error
            new = new if num_read else new.removeprefix(codecs.BOM_UTF8)
            try:
                decoder.decode(new, final=not new)
            except UnicodeDecodeError as error:
                raise _not_utf8(file, error, num_read=num_read, pending=len(error.object) - len(new)) from error
            if not new:
                break
            if 10 * new.count(0) >= len(new):
                raise BadInputError(
                    f"a tenth or more of {file} is NUL characters near byte {num_read}, as of UTF-16 without a mark "
                    "and of binary files: convert it, for example with iconv -f utf-16le -t utf-8, or leave it out "
                    "with dataset.pattern"
                )
            num_read += len(new)
            *complete, rest = _split(rest + new)
            for text in complete:
                yield TextChunk(text=text, ends=False)
    if rest:
        yield TextChunk(text=rest, ends=True)


def _split(text: bytes) -> list[bytes]:
    """Splits `text` into parts of at most CHUNK_BYTES, after a line or, within a long line, after a character."""
    parts: list[bytes] = []
    while len(text) > CHUNK_BYTES:
        end = text.rfind(b"\n", 0, CHUNK_BYTES) + 1
        if not end:
            end = CHUNK_BYTES
            while text[end] & 0xC0 == 0x80:
                end -= 1
        parts.append(text[:end])
        text = text[end:]
    return [*parts, text]


def _split_document(document: bytes) -> Iterator[TextChunk]:
    *parts, last = _split(document)
    yield from (TextChunk(text=part, ends=False) for part in parts)
    yield TextChunk(text=last, ends=True)


def json_lines(file: Path) -> Iterator[tuple[Any, str]]:
    """Yields (value, "FILE, line N") of each line that is not blank, or (value, "FILE, entry N") of each entry of a
    .json file that is one list. BadInputError names a line that is not JSON."""
    number = 0
    with _open(file) as stream:
        try:
            if file.name.lower().endswith((".json", ".json.gz")):
                is_list = stream.read(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
                stream.seek(0)
                entries = json.loads(b"".join(_lines(stream, file=file))) if is_list else []
                yield from ((value, f"{file}, entry {place}") for place, value in enumerate(entries, start=1))
            for number, line in enumerate(_lines(stream, file=file), start=1):
                if line.strip():
                    yield json.loads(line), f"{file}, line {number}"
        except UnicodeDecodeError as error:
            raise _not_utf8(file, error) from error
        except (ValueError, RecursionError, *_READ_ERRORS) as error:  # RecursionError: a value that is too deep
            where = f"{file}, line {number or getattr(error, 'lineno', 0)}"
            raise BadInputError(f"{where}: no JSON object per line can be read there ({error})") from error


def _lines(stream: Any, *, file: Path) -> Iterator[bytes]:
    """The lines of a file of JSON. Ends in BadInputError at a NUL character, behind which nothing is read: where a
    download was cut, many GB of them follow without an end of line."""
    parts: list[bytes] = []
    number = 1
    while part := stream.readline(CHUNK_BYTES):
        if 0 in part:
            raise BadInputError(
                f"{file}, line {number}: NUL characters, as of UTF-16 and of a download that was cut: convert it, for "
                "example with iconv -f utf-16 -t utf-8, or load it again"
            )
        parts.append(part)
        if part.endswith(b"\n"):
            yield b"".join(parts)
            parts.clear()
            number += 1
    if parts:
        yield b"".join(parts)


def _parquet_documents(file: Path, *, column: str) -> Iterator[str]:
    library = require_datasets()
    try:
        rows: Any = library.IterableDataset.from_parquet(str(file))
        if column not in (columns := list(rows.features or ())):
            raise _no_column(column, columns=columns, where=str(file))
        for number, row in enumerate(rows):
            yield _text_of(row, column=column, where=f"{file}, row {number}")
    except BadInputError:
        raise
    except Exception as error:  # pyarrow and datasets raise many kinds
        if "BatchSize must be greater than 0" in str(error):
            raise BadInputError(f"{file} holds no rows: leave it out, or give one with texts") from error
        raise BadInputError(f"{file} cannot be read as parquet ({first_line(error)})") from error


def _text_of(row: object, *, column: str, where: str) -> str:
    if not isinstance(row, dict):
        raise BadInputError(f"{where}: there must be an object such as {{{column!r}: 'a text'}}, not {str(row)[:40]!r}")
    if column not in row:
        raise BadInputError(f"{_no_column(column, columns=list(row), where=where)}, or leave the row out")
    if not isinstance(row[column], str):
        raise BadInputError(
            f"{where}: column {column!r} must hold text, not {type(row[column]).__name__}: write the text there, or "
            "leave the row out"
        )
    return row[column]


def _no_column(column: str, *, columns: Sequence[str], where: str) -> BadInputError:
    named = f"dataset.text_column={'|'.join(columns)}"
    return BadInputError(f"{where}: there is no column {column!r}; name it with {named}")


def _not_utf8(file: Path, error: UnicodeDecodeError, *, num_read: int = 0, pending: int = 0) -> BadInputError:
    """`num_read`: bytes before the block that failed; `pending`: how many of these begin its first character."""
    return BadInputError(
        f"{file} is not UTF-8 text (byte {num_read - pending + error.start}: {error.reason}): convert it, for example "
        "with iconv -f utf-16 -t utf-8 or iconv -f latin1 -t utf-8, or leave it out with dataset.pattern"
    )


def _open(file: Path) -> Any:
    """Opens a file for reading bytes, unpacked if its name ends with .gz. Raises BadInputError."""
    try:
        return gzip.open(file) if file.name.lower().endswith(".gz") else file.open("rb")
    except OSError as error:
        raise BadInputError(f"{file} cannot be read: {error.strerror}") from error
