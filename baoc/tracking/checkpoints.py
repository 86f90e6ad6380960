"""Loads checkpoints after verifying their checksums, and finds the one to resume from.

torch does not read the checksums of its archives and loads a file with flipped bytes without an error. A missing, torn,
damaged or foreign file is a CheckpointError with a message of its own.
"""

import fnmatch
import logging
import os
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from baoc.errors import CheckpointError, first_line
from baoc.tracking.checksum import checksum_matches
from baoc.units import format_bytes

log = logging.getLogger(__name__)

CHECKPOINT_SCHEMA = 1
SCHEMA_KEY = "baoc_schema"
META_KEY = "baoc"
WRITTEN_KEY = "written_s"  # inside META_KEY: seconds since 1970, since copying a file changes its own time
CHECKSUM_KEY = "baoc_sealed"  # true in a checkpoint that was written with a checksum: without one it is damaged
CHECKPOINT_FOLDER = "checkpoints"
CHECKPOINT_SUFFIX = ".ckpt"
RACE_FOLDER = "race"  # in a run's folder: the runs of its race, which are not the run's own
# What the `.metadata` file of torch.distributed.checkpoint may name: module -> classes and functions; dtypes as well
_SHARD_METADATA_GLOBALS = {
    "pathlib": ("PosixPath", "WindowsPath"),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
}
LAST_CHECKPOINT = f"last{CHECKPOINT_SUFFIX}"
REMEDY = "give resume=auto (the newest intact one), or the path of another checkpoint or run folder"


def load_checked(path: str | os.PathLike[str], *, baoc_only: bool = True, weights_only: bool = True) -> dict[str, Any]:
    """The content of a checkpoint, on the CPU, after its checksums were verified. Tensors are private memory maps of
    the file: writing to them does not change it.

    Args:
        baoc_only: refuse Lightning checkpoints of other programs.
        weights_only: False runs code from the file; for trusted sources only.

    Raises CheckpointError, which says what is wrong and what to do.
    """
    path = Path(path)
    try:
        has_checksum = _check_archive(path)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file raises struct.error, EOFError, OSError and others
        raise CheckpointError(f"{path} cannot be read: {first_line(error)[:160]}; {REMEDY}") from error
    try:
        # Mapped, so that the checkpoint takes no memory beside the tensors that are filled from it, and a resumed run
        # keeps its budget too. Files of torch before 1.6 are no archives and cannot be mapped.
        can_map = zipfile.is_zipfile(path)
        content = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=can_map)
    except pickle.UnpicklingError as error:
        raise _may_run_code(path, error) from None
    except Exception as error:
        raise CheckpointError(f"{path} is damaged: {first_line(error)[:160]}; {REMEDY}") from error
    if not isinstance(content, dict) or (baoc_only and SCHEMA_KEY not in content):
        keys = ", ".join(map(str, list(content)[:6])) if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(
            f"{path} was not written by baoc: it holds no {SCHEMA_KEY!r} but {keys or 'nothing'}; {REMEDY}"
        )
    if content.get(CHECKSUM_KEY) and not has_checksum:
        raise CheckpointError(f"{path} is damaged: the SHA-256 at its end is gone; {REMEDY}")
    schema = content.get(SCHEMA_KEY, CHECKPOINT_SCHEMA)
    if not isinstance(schema, int) or schema > CHECKPOINT_SCHEMA:
        raise CheckpointError(
            f"{path} has schema {schema} and this version of baoc reads up to {CHECKPOINT_SCHEMA}: upgrade baoc, or "
            f"{REMEDY}"
        )
    return content


class _NamesCodeError(Exception):
    pass


class _ShardMetadataUnpickler(pickle.Unpickler):
    """Unpickles the metadata of torch.distributed.checkpoint; raises _NamesCodeError if the file names anything
    else."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        is_dtype = module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)
        if is_dtype or global_name in _SHARD_METADATA_GLOBALS.get(module_name, ()):
            return super().find_class(module_name, global_name)
        raise _NamesCodeError(f"it names {module_name}.{global_name}")


def check_shard_metadata(folder: Path) -> None:
    """Raises CheckpointError if unpickling `.metadata` of a sharded checkpoint could run code. torch unpickles it."""
    path = folder / ".metadata"
    try:
        with path.open("rb") as file:
            _ShardMetadataUnpickler(file).load()
    except _NamesCodeError as error:
        raise _may_run_code(path, error) from None
    except Exception as error:  # unpickling a damaged file raises nearly anything
        raise CheckpointError(f"{path} cannot be read: {first_line(error)[:160]}; {REMEDY}") from error


def _may_run_code(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} holds Python objects beside tensors and plain values, which are not loaded as they may run code "
        f"({first_line(error)[:160]}): save plain hyperparameters, or convert the file if you trust its source; "
        f"{REMEDY}"
    )


def resolve_resume(
    setting: str | os.PathLike[str],
    *,
    run_root: str | os.PathLike[str],
    match: Mapping[str, Any] | None = None,
    check: Callable[[Mapping[str, Any]], object] = lambda content: None,
) -> Path | None:
    """The checkpoint that `resume=` selects.

    Args:
        setting: `auto` for the newest intact checkpoint below `run_root` whose metadata has the items of `match` (None
            if there is none; damaged ones are logged and skipped), a folder for its newest intact one, or a file.
        check: raises CheckpointError for a content that the caller cannot resume from; such a file counts as damaged.

    Raises CheckpointError if a path was given and no intact checkpoint is there.
    """
    if str(setting) == "auto":
        return _find_newest(Path(run_root), match=match, check=check)
    path = Path(setting).expanduser()
    if path.is_dir():
        newest = _find_newest(path, match=None, check=check)
        if newest is None:
            raise CheckpointError(
                f"{path} holds no intact checkpoint (*{CHECKPOINT_SUFFIX}, also in its sub-folders); {REMEDY}"
            )
        return newest
    _load(path, check=check)
    return path


def _load(path: Path, *, check: Callable[[Mapping[str, Any]], object]) -> dict[str, Any]:
    """The content of a checkpoint that passes `check`."""
    content = load_checked(path)
    try:
        check(content)
    except CheckpointError as error:
        raise CheckpointError(f"{path} {error}; {REMEDY}") from error
    return content


def _find_newest(
    folder: Path, *, match: Mapping[str, Any] | None, check: Callable[[Mapping[str, Any]], object]
) -> Path | None:
    if not folder.is_dir():
        return None
    walk = os.walk(folder)  # skips folders that disappear meanwhile or cannot be read
    pattern = f"[!.]*{CHECKPOINT_SUFFIX}"
    paths = [Path(top, name) for top, _, names in walk for name in fnmatch.filter(names, pattern)]
    files = [path for path in paths if os.path.isfile(path)]
    for path in newest_first(path for path in files if RACE_FOLDER not in path.relative_to(folder).parts):
        try:
            meta = _load(path, check=check).get(META_KEY, {})
        except CheckpointError as error:
            log.warning("passed over when looking for a checkpoint to resume: %s", error)
            continue
        if not match or (isinstance(meta, Mapping) and all(meta.get(key) == value for key, value in match.items())):
            return path
    return None


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Checkpoints by the time they were written, newest first; of files written together `last.ckpt` comes first."""
    return sorted(paths, key=lambda path: (_written_s(path), path.name == LAST_CHECKPOINT, path.name), reverse=True)


def _written_s(path: Path) -> float:
    """Seconds since 1970 at which the checkpoint was written, as it records them; else the file's modification time.
    Tensors are mapped and not read, since a folder may hold hundreds of checkpoints."""
    with suppress(Exception):  # a file of another program, or a damaged one
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        written = float(content[META_KEY][WRITTEN_KEY])
        if isfinite(written):
            return written
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _check_archive(path: Path) -> bool:
    """Whether the file ends with a SHA-256. Raises CheckpointError unless it is a complete torch archive whose SHA-256,
    or else the checksums of its entries, match."""
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder, not a checkpoint file; {REMEDY}")
    if not path.exists():
        names = sorted(p.name for p in path.parent.glob(f"*{CHECKPOINT_SUFFIX}")) if path.parent.is_dir() else []
        hint = f"that folder holds {', '.join(names[:8])}" if names else "that folder holds no checkpoint"
        raise CheckpointError(f"there is no checkpoint {path}: {hint}; {REMEDY}")
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(4)
    if size == 0 or (head.startswith(b"PK") and not zipfile.is_zipfile(path)):
        raise CheckpointError(
            f"{path} is truncated: its {format_bytes(size)} lack the end of the archive, so the program that wrote it "
            f"was stopped; {REMEDY}"
        )
    if not head.startswith(b"PK"):
        raise CheckpointError(f"{path} is no checkpoint: it is not a torch archive (it begins with {head!r}); {REMEDY}")
    matches = checksum_matches(path)
    if matches:
        return True
    if matches is False:
        raise CheckpointError(f"{path} is damaged: it does not agree with the SHA-256 at its end; {REMEDY}")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, OSError, NotImplementedError) as error:
        raise CheckpointError(f"{path} is damaged: {first_line(error)[:160]}; {REMEDY}") from None
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: {damaged} in it fails its checksum; {REMEDY}")
    return False
