"""Compiles `step.cpp` with the system's C++ compiler on first use and keeps the library in a cache folder.

The file name contains a hash of the sources, the flags, and the macros that the compiler predefines for this CPU. Files
are written under a temporary name and renamed, and one process compiles while the others wait for it. A library is
loaded only from a folder that no other user can write to, and only if it matches the hash stored next to it.
"""

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from time import monotonic, sleep

from baoc.cache import CACHE_VARIABLE, cache_folder, user, warn_unwritable, why_not_private, why_others_can_write

log = logging.getLogger(__name__)
SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++17", "-O3", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden",
    "-ffp-contract=off",  # fused multiply-adds are explicit in the source: results match torch's kernels bit for bit
    "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
_CPU_FLAGS = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler accepts is used
_TIMEOUT_S = 300


class Unavailable(Exception):
    """The library cannot be built or loaded; the text says why."""


def compiler() -> list[str]:
    """The compiler's command: $CXX, or the first of COMPILERS on the PATH. Raises Unavailable without one."""
    try:
        command = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise Unavailable(f"$CXX is no command: {error}") from error
    if command:
        if shutil.which(command[0]) is None:
            raise Unavailable(f"$CXX names {command[0]!r}, which is not found")
        return command
    path = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if path is None:
        raise Unavailable(f"there is no C++ compiler on the PATH ({', '.join(COMPILERS)}) and $CXX names none")
    return [path]


def library() -> ctypes.CDLL:
    """The compiled step. Tried once per process; raises Unavailable where it cannot be built or loaded."""
    result = library_or_error()
    if isinstance(result, Unavailable):
        raise result
    return result


@lru_cache(maxsize=1)
def library_or_error() -> ctypes.CDLL | Unavailable:
    """The library, or the error that `library` raises; a warning is logged once."""
    try:
        return load(compiled_step())
    except (OSError, RuntimeError) as error:  # Path.home() raises RuntimeError without a home folder
        why = Unavailable(f"the native step cannot be built or loaded: {error}")
    except Unavailable as error:
        why = error
    log.warning("optimizer steps on the CPU are eager, so 8-bit states cost many times more: %s", why)
    return why


def load(path: Path) -> ctypes.CDLL:
    """Loads a library and declares the types of its functions."""
    loaded = ctypes.CDLL(str(path))
    loaded.baoc_step.argtypes, loaded.baoc_step.restype = [ctypes.c_void_p], None
    loaded.baoc_chunk.argtypes, loaded.baoc_chunk.restype = [ctypes.c_int32], ctypes.c_int64
    return loaded


def compiled_step() -> Path:
    """Path of the library of `step.cpp`, compiled unless the cache has it."""
    command = compiler()
    flags, macros = _cpu_flags(command)
    if "__AVX512F__" in macros:
        flags = (*flags, "-mprefer-vector-width=512")
    files = sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))
    parts = [*command, *FLAGS, *flags, macros, platform.platform(), *(path.read_text() for path in files)]
    return cached_library("step", parts, lambda path: compile_source([*command, *FLAGS, *flags], target=path))


def compiled(source: Path, *, flags: Sequence[str]) -> Path:
    """Path of the library of a single C source, compiled unless cached. Raises Unavailable or OSError."""
    command = [*compiler(), *flags, "-x", "c"]
    parts = [*command, platform.platform(), source.read_text()]
    return cached_library(source.stem, parts, lambda path: compile_source(command, target=path, source=source))


def cached_library(stem: str, parts: Sequence[str], make: Callable[[Path], None]) -> Path:
    """Path of the cached library for the hash of `parts`; `make(path)` builds it if there is none.

    The library runs with the rights of the user who loads it, so the folder must be private to that user. Without such
    a folder, a temporary one of this process is used. Raises Unavailable if there is none either.
    """
    name = f"{stem}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}.so"
    for folder in (cache_folder(), Path(tempfile.gettempdir()) / f"baoc-{user()}"):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if (fault := why_others_can_write(folder)) is not None:
                log.warning(
                    "%s: libraries of the native step are not kept there; set $%s to a folder of yours",
                    fault,
                    CACHE_VARIABLE,
                )
                continue
            return _verified(folder / name, make)
        except OSError as error:
            log.info("folder %s cannot keep the library: %s", folder, error)
            warn_unwritable(folder, error)
    try:
        folder = Path(tempfile.mkdtemp(prefix="baoc-"))
    except OSError as error:
        raise Unavailable(
            f"neither {cache_folder()} nor the folder for temporary files can keep it ({error}); set ${CACHE_VARIABLE} "
            "to a folder that only you may write"
        ) from error
    atexit.register(_remove, folder, process=os.getpid())
    return _verified(folder / name, make)


def _remove(folder: Path, *, process: int) -> None:
    if os.getpid() == process:  # forked processes run exit handlers too
        shutil.rmtree(folder, ignore_errors=True)


def _verified(path: Path, make: Callable[[Path], None]) -> Path:
    """Returns `path`, after building the library anew unless the user owns it and it matches its stored hash."""
    if _is_intact(path):
        return path
    with _one_at_a_time(path.parent):
        if not _is_intact(path):
            make(path)
            # Not named by the process: those of two containers that share a cache may have one number.
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
            os.close(handle)
            Path(temporary).write_text(hash_of(path))
            os.replace(temporary, path.with_suffix(".sha256"))
    return path


def _is_intact(path: Path) -> bool:
    try:
        is_private = why_not_private(path.lstat(), is_folder=False) is None
        return is_private and path.with_suffix(".sha256").read_text() == hash_of(path)
    except (OSError, ValueError):
        return False


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Holds the lock of `folder`, else ranks that start together would all compile. Goes on without it where a file
    system has none, and after as long as a compiler may take."""
    handle, deadline = -1, monotonic() + _TIMEOUT_S
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    try:
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY)
            while monotonic() < deadline:
                with suppress(BlockingIOError):
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                sleep(0.05)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # a process that was forked meanwhile has the handle too
        with suppress(OSError):
            os.close(handle)


def hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _cpu_flags(command: list[str]) -> tuple[tuple[str, ...], str]:
    """(flags for this CPU, macros that the compiler predefines with them, such as its version and instruction sets)."""
    stderr = ""
    for flags in _CPU_FLAGS:
        done = _run([*command, *flags, "-dM", "-E", "-x", "c++", os.devnull])
        if done.returncode == 0:
            return flags, done.stdout
        stderr = done.stderr
    raise Unavailable(f"{command[0]} does not work: {stderr.strip()[-500:]}")


def compile_source(command: list[str], *, target: Path, source: Path = SOURCES / "step.cpp") -> None:
    """Compiles `source` to `target`, in one rename. Raises Unavailable with the compiler's error."""
    log.info("compiling %s of the native optimizer step with %s, once for this machine", source.name, command[0])
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.stem, suffix=".tmp")
    os.close(handle)
    try:
        done = _run([*command, str(source), "-o", temporary])
        if done.returncode != 0:
            raise Unavailable(f"{command[0]} cannot compile the native step: {done.stderr.strip()[-1000:]}")
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command[0]} took more than {_TIMEOUT_S} s") from error
