"""A SHA-256 of a checkpoint, stored in its ZIP archive's comment, which other readers ignore.

The archive's own checksums have 32 bits and cover its entries' contents, not their headers. As the hash is in the file,
both are renamed together.
"""

import hashlib
import os
from pathlib import Path
from typing import IO

MARK = b"baoc-sha256:"
_LENGTH_BYTES = 2  # a ZIP archive ends with the length of its comment, 0 for none
_TRAILER_BYTES = _LENGTH_BYTES + len(MARK) + 64
_CHUNK_BYTES = 1 << 22


class ChecksumFile:
    """A file for `torch.save` that hashes the bytes it writes to `file`."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._hash = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def append_checksum(self) -> None:
        """Writes the hash as the archive's comment. Call it once, when the archive is complete."""
        comment = MARK + self._hash.hexdigest().encode()
        self._file.seek(-_LENGTH_BYTES, os.SEEK_END)
        self._file.write(len(comment).to_bytes(_LENGTH_BYTES, "little") + comment)


def checksum_matches(path: Path) -> bool | None:
    """Whether the file agrees with its checksum; None for a file without one, such as another program's."""
    size = path.stat().st_size
    if size <= _TRAILER_BYTES:
        return None
    with path.open("rb") as file:
        file.seek(size - _TRAILER_BYTES + _LENGTH_BYTES)
        trailer = file.read()
        if not trailer.startswith(MARK):
            return None
        file.seek(0)
        digest, remaining = hashlib.sha256(), size - _TRAILER_BYTES
        while remaining:
            chunk = file.read(min(_CHUNK_BYTES, remaining))
            digest.update(chunk)
            remaining -= len(chunk)
        length = file.read(_LENGTH_BYTES)
    digest.update(bytes(_LENGTH_BYTES))  # it was hashed as an archive without a comment
    return trailer == MARK + digest.hexdigest().encode() and int.from_bytes(length, "little") == len(trailer)
