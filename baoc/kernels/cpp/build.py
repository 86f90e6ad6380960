"""Compiling `step.cpp` with the system's C++ compiler when it is first needed, and keeping the library in a cache.

What is in the cache is found by a hash of the sources, the flags and everything that the compiler says of itself and of
this CPU. Files are written aside and renamed, so processes may compile at the same time.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

log = logging.getLogger(__name__)
SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
CACHE = "BAOC_CACHE"  # environment variable: the folder to keep libraries in
FLAGS = (
    "-std=c++17", "-O3", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden",
    "-ffp-contract=off",  # what is fused is written so, because torch's kernels are held to bit for bit
    "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
_CPU_FLAGS = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler knows
_LONGEST_S = 300


class Unavailable(Exception):
    """There is no library, and the text says why."""


def cache_folder() -> Path:
    """Where libraries are kept: $BAOC_CACHE, else the user's cache as the platform has it."""
    given = os.environ.get(CACHE)
    if given:
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "baoc"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "baoc"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baoc"


def compiler() -> list[str]:
    """The command of the compiler: $CXX, else the first of `COMPILERS` on the PATH."""
    given = shlex.split(os.environ.get("CXX", ""))
    if given:
        if shutil.which(given[0]) is None:
            raise Unavailable(f"$CXX names {given[0]!r}, which is not to be found")
        return given
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        raise Unavailable(f"there is no C++ compiler on the PATH ({', '.join(COMPILERS)}) and $CXX names none")
    return [found]


def is_loaded() -> bool:
    """True if this process has the library already; asking for it may take a compiler's time."""
    return bool(library_or_why.cache_info().currsize) and not isinstance(library_or_why(), Unavailable)


def library() -> ctypes.CDLL:
    """The compiled step. Raises Unavailable where it cannot be had; asks once per process."""
    found = library_or_why()
    if isinstance(found, Unavailable):
        raise found
    return found


@lru_cache(maxsize=1)
def library_or_why() -> ctypes.CDLL | Unavailable:
    try:
        return load(compiled_step())
    except (OSError, RuntimeError) as error:  # also of Path.home(), where there is no home
        why = Unavailable(f"the native step cannot be built or loaded: {error}")
    except Unavailable as error:
        why = error
    log.warning("optimizer steps on the CPU are eager, so 8-bit states cost many times more: %s", why)
    return why


def load(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    loaded.baoc_step.argtypes, loaded.baoc_step.restype = [ctypes.c_void_p], None
    loaded.baoc_all_finite.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32]
    loaded.baoc_all_finite.restype = ctypes.c_int32
    loaded.baoc_chunk.argtypes, loaded.baoc_chunk.restype = [ctypes.c_int32], ctypes.c_int64
    return loaded


def compiled_step() -> Path:
    """Path of the library, compiled if the cache does not have it."""
    command = compiler()
    flags, told = _cpu_flags(command)
    if "__AVX512F__" in told:
        flags = (*flags, "-mprefer-vector-width=512")
    files = sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))
    parts = [*command, *FLAGS, *flags, told, platform.platform(), *(path.read_text() for path in files)]
    return _kept("step", parts, lambda path: compile_source([*command, *FLAGS, *flags], target=path))


def compiled(source: Path, *, flags: Sequence[str]) -> Path:
    """Path of the library of one source in C, which takes the compiler a moment. Raises Unavailable or OSError."""
    command = [*compiler(), *flags, "-x", "c"]
    parts = [*command, platform.platform(), source.read_text()]
    return _kept(source.stem, parts, lambda path: compile_source(command, target=path, source=source))


def _kept(stem: str, parts: Sequence[str], make: Callable[[Path], None]) -> Path:
    """The library in the cache that was made of `parts`, made now if there is none."""
    name = f"{stem}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}.so"
    for folder in (cache_folder(), Path(tempfile.gettempdir()) / f"baoc-{_user()}"):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if _foreign(folder):
                continue
            path = folder / name
            if not path.exists():
                make(path)
            return path
        except OSError as error:
            log.info("no library is kept in %s: %s", folder, error)
    raise Unavailable(f"neither {cache_folder()} nor the folder for temporary files can be written; set ${CACHE}")


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def _foreign(folder: Path) -> bool:
    """True if another user could have put a library there."""
    return hasattr(os, "getuid") and folder.stat().st_uid not in (os.getuid(), 0)


def _cpu_flags(command: list[str]) -> tuple[tuple[str, ...], str]:
    """The flags that mean this CPU, and what the compiler then predefines: its version, the CPU's instructions."""
    said = ""
    for flags in _CPU_FLAGS:
        done = _run([*command, *flags, "-dM", "-E", "-x", "c++", os.devnull])
        if done.returncode == 0:
            return flags, done.stdout
        said = done.stderr
    raise Unavailable(f"{command[0]} does not work: {said.strip()[-500:]}")


def compile_source(command: list[str], *, target: Path, source: Path = SOURCES / "step.cpp") -> None:
    log.info("compiling %s of the native optimizer step with %s, once for this machine", source.name, command[0])
    handle, aside = tempfile.mkstemp(dir=target.parent, prefix=target.stem, suffix=".tmp")
    os.close(handle)
    try:
        done = _run([*command, str(source), "-o", aside])
        if done.returncode != 0:
            raise Unavailable(f"{command[0]} cannot compile the native step: {done.stderr.strip()[-1000:]}")
        os.replace(aside, target)
    finally:
        Path(aside).unlink(missing_ok=True)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_LONGEST_S, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command[0]} took more than {_LONGEST_S} s") from error
