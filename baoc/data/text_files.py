"""Reads text files as a stream of chunks: plain text, JSON lines (also gzipped, as C4 is distributed) and parquet.

A chunk is at most CHUNK_BYTES of UTF-8 and never ends inside a character, so sets of any size are read in little
memory.
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
_BROKEN = (OSError, EOFError, zlib.error)  # of a file, or of what gzip has in it
_TEXT = (".txt", ".text", ".md", ".txt.gz", ".text.gz", ".md.gz")
JSON = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")
_PARQUET = (".parquet",)
_PACKED = (".tar.gz", ".tgz", ".zip", ".tar", ".7z", ".rar", ".xz", ".bz2", ".zst", ".lz4")
MOST_NULS = 10  # a tenth of a part of a file
_HOW = f"give a text file in UTF-8, a folder of them ({', '.join(_TEXT)}), JSON lines or parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextChunk:
    """A part of a document; `ends`: it is the last part."""

    text: bytes
    ends: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFiles:
    """The ordered files of a set. Each call of `chunks` reads them again; BadInputError names an unreadable file."""

    name: str
    files: tuple[Path, ...]
    text_column: str = "text"

    def chunks(self) -> Iterator[TextChunk]:
        for file in self.files:
            name = file.name.lower()
            if not name.endswith(_PARQUET + JSON):
                yield from _plain_text(file)
                continue
            read = _parquet_documents if name.endswith(_PARQUET) else _json_documents
            for document in filter(None, read(file, column=self.text_column)):
                yield from _chunks_of(document.encode("utf-8", errors="replace"))  # JSON may escape half a surrogate


@dataclass(frozen=True, slots=True, kw_only=True)
class InMemoryText(TextFiles):
    """One document that is in memory."""

    files: tuple[Path, ...] = ()
    text: bytes = field(repr=False)

    def chunks(self) -> Iterator[TextChunk]:
        yield from _chunks_of(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """`sha256` of the concatenated text; `key` is a hash that also depends on the ends of documents."""

    num_bytes: int
    sha256: str
    key: str


def find_text(path: str | Path, *, pattern: str | None = None, text_column: str = "text") -> TextFiles:
    """The text of a file, or of a folder and its subfolders.

    `pattern`: a glob for names of files, instead of the known endings. Names that begin with a dot are left out. Raises
    BadInputError for a path without text.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise BadInputError(f"dataset.path={path} does not exist: {_HOW}")
    if path.is_file():
        if (ending := _ending(path)) in _PACKED:
            raise BadInputError(f"dataset.path={path} is packed: {_unpack(ending)}; {_HOW}")
        return TextFiles(name=path.name.split(".")[0] or path.name, files=(path,), text_column=text_column)
    within = sorted((file.relative_to(path) for file in path.rglob(pattern or "*")), key=lambda file: file.as_posix())
    within = [file for file in within if not is_hidden(file)]
    held = [path / file for file in within if (path / file).is_file()]
    known = held if pattern else [file for file in held if file.name.lower().endswith(_TEXT + JSON + _PARQUET)]
    left = [] if pattern else sorted(set(held) - set(known))
    others = sorted({_ending(file) for file in left})
    if not known:
        holds = f"holds no file that matches {pattern!r}" if pattern else "holds no text"
        beside = f", only {', '.join(others[:8])}" if others else ""
        if packed := next((ending for ending in others if ending in _PACKED), None):
            beside += f": {_unpack(packed)}"
        elif others:
            beside += f": dataset.pattern='*{others[0]}' reads those as text"
        raise BadInputError(f"dataset.path={path} {holds}{beside}; {_HOW}")
    if packed := next((file for file in known if _ending(file) in _PACKED), None):
        raise BadInputError(
            f"dataset.pattern={pattern} takes {packed}, which is packed: {_unpack(_ending(packed))}, or give a pattern "
            "that leaves it out"
        )
    if left:
        told = ", ".join(others[:8])
        log.warning("%s: %d files that are no text by their endings (%s) are left out", path, len(left), told)
    return TextFiles(name=path.resolve().name, files=tuple(known), text_column=text_column)


def _ending(file: Path) -> str:
    """That of a packed file, which may have two parts, in lower case; else the last one; the name of a file without."""
    return next((ending for ending in _PACKED if file.name.lower().endswith(ending)), file.suffix or file.name)


def _unpack(ending: str) -> str:
    return f"unpack {ending} files first, of compressed ones .gz alone is read"


def hash_text(source: TextFiles) -> Content:
    """Reads everything once and hashes it. Raises BadInputError if there is no text."""
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
    """The text from byte `start` to byte `end`, each moved on to the next beginning of a character."""
    at = 0
    for chunk in chunks:
        low, high = (_character_from(chunk.text, bound - at) for bound in (start, end))
        if low < high:
            yield TextChunk(text=chunk.text[low:high], ends=chunk.ends and high == len(chunk.text))
        at += len(chunk.text)
        if at >= end:
            return


def _character_from(text: bytes, offset: int) -> int:
    at = min(max(offset, 0), len(text))
    while at < len(text) and text[at] & 0xC0 == 0x80:  # inside a UTF-8 character
        at += 1
    return at


# -- kinds of files ---------------------------------------------------------------------------------------------------


def _plain_text(file: Path) -> Iterator[TextChunk]:
    """One document; chunks end with a line where possible."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    held, read = b"", 0
    with _opened(file) as stream:
        while True:
            try:
                new: bytes = stream.read(CHUNK_BYTES)
            except _BROKEN as error:
                raise BadInputError(f"{file} cannot be read after {read} bytes: {error}") from error
            new = new if read else new.removeprefix(codecs.BOM_UTF8)
            try:
                decoder.decode(new, final=not new)
            except UnicodeDecodeError as error:
                raise _undecodable(file, error, read=read, pending=len(error.object) - len(new)) from error
            if not new:
                break
            if MOST_NULS * new.count(0) >= len(new):
                raise BadInputError(
                    f"a tenth or more of {file} is NUL characters near byte {read}, as of UTF-16 without a mark and of "
                    "binary files: convert it, for example with iconv -f utf-16le -t utf-8, or leave it out with "
                    "dataset.pattern"
                )
            read += len(new)
            *complete, held = _cut(held + new)
            for text in complete:
                yield TextChunk(text=text, ends=False)
    if held:
        yield TextChunk(text=held, ends=True)


def _cut(text: bytes) -> list[bytes]:
    """`text` in parts of at most CHUNK_BYTES, which end with a line or, within a long line, with a character."""
    parts: list[bytes] = []
    while len(text) > CHUNK_BYTES:
        at = text.rfind(b"\n", 0, CHUNK_BYTES) + 1
        if not at:
            at = CHUNK_BYTES
            while text[at] & 0xC0 == 0x80:
                at -= 1
        parts.append(text[:at])
        text = text[at:]
    return [*parts, text]


def _chunks_of(document: bytes) -> Iterator[TextChunk]:
    *parts, last = _cut(document)
    yield from (TextChunk(text=part, ends=False) for part in parts)
    yield TextChunk(text=last, ends=True)


def _json_documents(file: Path, *, column: str) -> Iterator[str]:
    for row, where in json_lines(file):
        yield _text_of(row, column=column, where=where)


def json_lines(file: Path) -> Iterator[tuple[Any, str]]:
    """Each value of a file of JSON lines, blank ones left out, and where it is. BadInputError names a bad line."""
    number = 0
    with _opened(file) as stream:
        try:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield json.loads(line), f"{file}, line {number}"
        except UnicodeDecodeError as error:
            raise _undecodable(file, error) from error
        except (json.JSONDecodeError, *_BROKEN) as error:
            where = f"{file}, line {number}"
            raise BadInputError(f"{where}: no JSON object per line can be read there ({error})") from error


def _parquet_documents(file: Path, *, column: str) -> Iterator[str]:
    library = require_datasets()
    try:
        rows: Any = library.IterableDataset.from_parquet(str(file))
        if column not in (held := list(rows.features or ())):
            raise _no_column(column, held=held, where=str(file))
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
        raise _no_column(column, held=list(row), where=where)
    if not isinstance(row[column], str):
        raise BadInputError(f"{where}: column {column!r} must hold text, not {type(row[column]).__name__}")
    return row[column]


def _no_column(column: str, *, held: Sequence[str], where: str) -> BadInputError:
    return BadInputError(f"{where}: there is no column {column!r}; name it with dataset.text_column={'|'.join(held)}")


def _undecodable(file: Path, error: UnicodeDecodeError, *, read: int = 0, pending: int = 0) -> BadInputError:
    """`read`: bytes of the file before the part that failed; `pending`: bytes of these that the decoder still held."""
    at = read - pending + error.start
    return BadInputError(
        f"{file} is not UTF-8 text (byte {at}: {error.reason}): convert it, for example with "
        "iconv -f utf-16 -t utf-8 or iconv -f latin1 -t utf-8, "
        "or leave it out with dataset.pattern"
    )


def _opened(file: Path) -> Any:
    try:
        return gzip.open(file) if file.name.lower().endswith(".gz") else file.open("rb")
    except OSError as error:
        raise BadInputError(f"{file} cannot be read: {error.strerror}") from error
