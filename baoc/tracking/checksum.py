"""A SHA-256 over a whole checkpoint, kept in the checkpoint itself as the comment of its archive.

The archive's own checksums are 32 bits wide and cover the contents of its entries, not what describes them. One file
holds both, so a checkpoint and its hash are renamed together; every reader of such archives passes over comments.
"""

import hashlib
import os
from pathlib import Path
from typing import IO

MARK = b"baoc-sha256:"
_LENGTH = 2  # bytes at the end of an archive without a comment that say so
_TRAILER = _LENGTH + len(MARK) + 64
_PART = 1 << 22


class SealingFile:
    """What `torch.save` writes to: passes everything on to `file` and hashes it; `seal` then adds the comment."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._hash = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def seal(self) -> None:
        """To be called once, when the archive is complete."""
        comment = MARK + self._hash.hexdigest().encode()
        self._file.seek(-_LENGTH, os.SEEK_END)
        self._file.write(len(comment).to_bytes(_LENGTH, "little") + comment)


def seal_holds(path: Path) -> bool | None:
    """Whether the file is what was sealed; None where it has no seal, as files of other programs have none."""
    size = path.stat().st_size
    if size <= _TRAILER:
        return None
    with path.open("rb") as file:
        file.seek(size - _TRAILER + _LENGTH)
        trailer = file.read()
        if not trailer.startswith(MARK):
            return None
        file.seek(0)
        found, left = hashlib.sha256(), size - _TRAILER
        while left:
            part = file.read(min(_PART, left))
            found.update(part)
            left -= len(part)
        length = file.read(_LENGTH)
    found.update(bytes(_LENGTH))  # an archive without a comment ends in zeros
    return trailer == MARK + found.hexdigest().encode() and int.from_bytes(length, "little") == len(trailer)
