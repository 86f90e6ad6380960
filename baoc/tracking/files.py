"""Atomic writes of files, and JSON lines files that survive a kill.

A file is written under a temporary name, fsynced and renamed, so that a full disk or an interrupt never leaves a
partial file under its own name. In a JSON lines file a torn last line is recognised.
"""

import csv
import io
import json
import logging
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from baoc.errors import DISK_FULL_ERRNOS, BadInputError, OutputError, disk_full_error
from baoc.types import to_plain

log = logging.getLogger(__name__)

REALLOCATIONS_FILE = "reallocations.jsonl"


@contextmanager
def as_output_error(path: Path) -> Iterator[None]:
    """Raises an OSError of the block, which writes `path`, as an OutputError with its remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            raise disk_full_error(error, path) from error
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}; make the folder writable or set hydra.run.dir "
            "(hydra.sweep.dir for a multirun) to another one"
        ) from error


@contextmanager
def atomic_write(path: str | os.PathLike[str], *, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Yields a temporary file that replaces `path` when the block ends without an error. Its permissions are `mode`
    less the umask. After an error `path` keeps its content. Raises OutputError if the folder cannot be written."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    with as_output_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "xb", opener=partial(os.open, mode=mode)) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        with suppress(OSError):  # makes the rename durable, on systems that can open a folder
            descriptor = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    with atomic_write(path) as file:
        file.write(text.encode())


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes a value of `baoc.types`, or plain containers of them, as indented JSON; NaN and infinities become null."""
    write_text(path, json.dumps(to_plain(value), indent=2, allow_nan=False, default=_json_default) + "\n")


def write_csv(
    path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]], *, columns: Sequence[str] | None = None
) -> None:
    """Writes rows as CSV; `columns` defaults to every key in order of first appearance, None becomes an empty cell."""
    names = list(columns) if columns is not None else list(dict.fromkeys(key for row in rows for key in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, names, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(to_plain(row) for row in rows)
    write_text(path, buffer.getvalue())


def read_json(path: str | os.PathLike[str]) -> Any:
    """The value in a JSON file. Raises BadInputError if the file is missing or not JSON."""
    path = Path(path)
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise BadInputError(f"there is no file {path}: give the folder of a finished run") from None
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path} is not JSON ({error}): it was damaged or is no file of ours; remove it") from None


def read_record(path: str | os.PathLike[str], fields: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """The object in a JSON file. `fields`: the types of those that its reader needs, by dotted name. Raises
    BadInputError as `read_json` does, and for a file that lacks one of them."""
    record = read_json(path)
    lacking = [name for name, kind in fields.items() if not isinstance(_field(record, name), kind)]
    if not isinstance(record, dict) or lacking:
        what = f"lacks a valid {', '.join(lacking[:4])}" if lacking else "holds no object"
        raise BadInputError(f"{path} {what}: it was damaged or is no file of ours; remove it")
    return record


def _field(record: Any, name: str) -> Any:
    """The value at a dotted name; Ellipsis if there is none."""
    for part in name.split("."):
        record = record.get(part, ...) if isinstance(record, Mapping) else ...
    return record


class FolderGuard:
    """Detects that a run's folder was removed or moved during the run. Otherwise writers would create it again, and the
    run would end as if nothing were lost."""

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self._descriptor = -1
        with suppress(OSError):  # folders cannot be opened on Windows, where one in use cannot be removed either
            self._descriptor = os.open(self.folder, os.O_RDONLY)

    def check(self) -> None:
        """Raises OutputError unless the folder is still there. No other folder gets its inode number while it is
        open."""
        with suppress(OSError):
            if self._descriptor < 0 or os.path.samestat(self.folder.stat(), os.fstat(self._descriptor)):
                return
        raise OutputError(
            f"the run folder {self.folder} was removed or moved while the run wrote into it, so what was written is "
            "not there any more: leave it in place until the run ends, and start the run again"
        )

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class LineFile:
    """An append-only file of JSON lines; a record is on disk when `append` returns.

    Opening it moves a torn last line into `NAME.torn`, so that the next record starts on its own line. A file that was
    removed meanwhile is restored with its earlier lines."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        with as_output_error(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self.was_torn = self._open()

    def _open(self) -> bool:
        """Opens the file; returns whether it ended in a torn line."""
        with as_output_error(self.path):
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            return self._set_torn_line_aside()

    def append(self, record: Any) -> None:
        """Writes one record. On a full disk cuts the partial line off and raises OutputError."""
        line = json.dumps(to_plain(record), allow_nan=False, default=_json_default).encode() + b"\n"
        self._restore_if_replaced()
        size = os.fstat(self._descriptor).st_size
        with as_output_error(self.path):
            try:
                written = 0
                while written < len(line):
                    written += os.write(self._descriptor, line[written:])
                os.fsync(self._descriptor)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, size)
                raise

    def close(self) -> None:
        if self._descriptor >= 0:
            try:
                if self.path.parent.is_dir():
                    self._restore_if_replaced()
            finally:
                os.close(self._descriptor)
                self._descriptor = -1

    def _restore_if_replaced(self) -> None:
        """Continues in the file that is at `path` now; restores one that was removed from the open descriptor."""
        with as_output_error(self.path):
            try:
                if os.path.samestat(self.path.stat(), os.fstat(self._descriptor)):
                    return
                log.warning("%s was replaced while it was written: further lines go to the new one", self.path)
            except FileNotFoundError:
                content = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
                with atomic_write(self.path) as file:
                    file.write(content)
                log.warning("%s was removed while it was written: it is written again, with all that it had", self.path)
        os.close(self._descriptor)
        self._open()

    def _set_torn_line_aside(self) -> bool:
        size = os.fstat(self._descriptor).st_size
        if size == 0 or os.pread(self._descriptor, 1, size - 1) == b"\n":
            return False
        content = self.path.read_bytes()
        start = content.rfind(b"\n") + 1
        tail = content[start:]
        if _parse_object(tail) is not None:  # complete but for its line break, as no prefix of an object is an object
            os.write(self._descriptor, b"\n")
            return False
        with self.path.with_name(self.path.name + ".torn").open("ab") as torn:
            torn.write(tail + b"\n")
        os.ftruncate(self._descriptor, start)
        log.warning("%s ended in a torn line of %d bytes: set aside in %s.torn", self.path, len(tail), self.path.name)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def append_jsonl(path: str | os.PathLike[str], record: Any) -> None:
    """Appends one record to a JSON lines file; it is on disk when this returns."""
    with LineFile(path) as file:
        file.append(record)


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a JSON lines file. A torn last line is skipped with a warning; the file is not changed. Raises
    BadInputError if the file is missing, or a line before the last one is not a JSON object."""
    path = Path(path)
    if not path.is_file():
        raise BadInputError(f"there is no file {path}: give the folder of a run")
    lines = path.read_bytes().split(b"\n")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        record = _parse_object(line)
        if record is not None:
            records.append(record)
        elif number == len(lines) and line:
            log.warning("%s ends in a torn line of %d bytes: left out", path, len(line))
        elif line:
            raise BadInputError(f"{path}, line {number} is not a JSON object: the file was damaged; remove that line")
    return records


def _parse_object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _json_default(value: Any) -> Any:
    """JSON for values outside `baoc.types`: paths, and scalars of numpy and torch."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        return to_plain(value.item())
    raise TypeError(f"cannot write a {type(value).__name__} as JSON: give plain values or those of baoc.types")
