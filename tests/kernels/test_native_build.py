"""Compiling the native step: what happens without a compiler, with a broken one, and with several processes at once."""

import fcntl
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from torch import nn

from baoc import cache
from baoc.cache import ensure_private_folder, read_private, why_others_can_write
from baoc.errors import BadInputError
from baoc.kernels.cpp import build
from baoc.models.switches import start_compiler
from baoc.optim import BlockwiseOptimizer
from tests.support.commands import start_script

# Steps 1M elements once with the native step.
STEP = """
import torch
from baoc.optim import BlockwiseOptimizer
param = torch.nn.Parameter(torch.ones(1000, 1001))
optimizer = BlockwiseOptimizer([param], "adamw_int8", lr=0.5, weight_decay=0.0, backend="native")
param.grad = torch.ones_like(param)
optimizer.step()
print(sorted({choice.backend for choice in optimizer.registry.choices.values()}), f"{param[0, 0].item():.4f}")
"""


@pytest.fixture(autouse=True)
def found_anew(monkeypatch: pytest.MonkeyPatch):
    """The library is looked for once per process, so what a test found must not stay."""
    build.library_or_error.cache_clear()
    yield
    build.library_or_error.cache_clear()


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "cache"))


def stepped(backend: str, *, rows: int = 1000) -> str:
    """What steps about a million elements once, and where that brings them."""
    param, other = nn.Parameter(torch.ones(rows, 1001)), nn.Parameter(torch.ones(10))
    optimizer = BlockwiseOptimizer([param, other], "adamw_int8", lr=0.5, weight_decay=0.0, backend=backend)
    param.grad = torch.ones_like(param)
    optimizer.step()
    return f"{sorted({choice.backend for choice in optimizer.registry.choices.values()})} {param[0, 0].item():.4f}"


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_auto_is_eager_and_says_so_once(caplog: pytest.LogCaptureFixture):
    assert [stepped("auto") for _ in range(2)] == ["['eager'] 0.5000"] * 2
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "optimizer steps on the CPU are eager, so 8-bit states cost many times more: there is no C++ compiler on the "
        "PATH (c++, g++, clang++) and $CXX names none"
    ]


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_native_is_refused_by_name():
    with pytest.raises(BadInputError) as caught:
        stepped("native")
    text = str(caught.value)
    assert text.startswith("the native optimizer backend cannot be used: there is no C++ compiler on the PATH")
    assert "Install a C++17 compiler (g++ or clang++) or name one in $CXX" in text


@pytest.mark.usefixtures("no_compiler")
def test_small_networks_ask_for_no_compiler(caplog: pytest.LogCaptureFixture):
    assert stepped("auto", rows=10) == "['eager'] 0.5000" and not caplog.records


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("no-such-compiler -O2", "names 'no-such-compiler', which is not found"),
        ("g++ '", "is no command: No closing quotation"),
    ],
)
def test_a_compiler_that_is_not_there(named: str, told: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", named)
    with pytest.raises(build.Unavailable, match=told):
        build.library()


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\ncase \"$*\" in *step.cpp*) echo 'out of luck' >&2; exit 1;; esac\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    with pytest.raises(build.Unavailable, match="cannot compile the native step: out of luck"):
        build.library()
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_library_that_is_torn_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    torn = tmp_path / "step.so"
    torn.write_bytes(b"\x7fELF")
    monkeypatch.setattr(build, "compiled_step", lambda: torn)
    with pytest.raises(build.Unavailable, match="cannot be built or loaded"):
        build.library()


@pytest.mark.slow
def test_processes_that_start_at_once_share_one_cache(tmp_path: Path):
    quick = tmp_path / "quick"  # what is compiled without being optimised is compiled in a quarter of the time
    quick.write_text('#!/bin/sh\nexec g++ "$@" -O0\n')
    quick.chmod(0o755)
    (script := tmp_path / "step.py").write_text(STEP)
    variables: dict[str, Any] = {"CXX": str(quick), cache.CACHE_VARIABLE: str(tmp_path / "cache")}
    started = [start_script(script, folder=tmp_path / name, **variables) for name in ("one", "other")]
    assert [process.done() for process in started] == [(0, "['native'] 0.5000\n")] * 2
    noted, kept = sorted((tmp_path / "cache").iterdir())
    assert kept.suffix == ".so" and kept.stat().st_size > 10_000 and noted == kept.with_suffix(".sha256")


def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch):
    build.library()
    build.library_or_error.cache_clear()

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("it is in the cache")

    monkeypatch.setattr(build, "compile_source", refuse)
    build.library()
    build.library_or_error.cache_clear()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    with pytest.raises(AssertionError, match="it is in the cache"):
        build.library()


def test_a_cache_that_cannot_be_written_gives_way_to_temporary_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    written = []

    def write(command: list[str], *, target: Path) -> None:
        target.write_bytes(b"library")
        written.append(target)

    monkeypatch.setattr(build, "compile_source", write)
    monkeypatch.setattr(build, "load", lambda path: path)
    assert build.library() == written[0]
    assert written[0].parent.parent == tmp_path and written[0].parent.name.startswith("baoc-")


def test_the_cache_is_where_the_platform_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv(cache.CACHE_VARIABLE)
    monkeypatch.setattr(cache.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / "baoc"
    monkeypatch.setattr(cache.sys, "platform", "darwin")
    assert cache.cache_folder() == Path.home() / "Library" / "Caches" / "baoc"

    def no_account() -> Path:  # a container's user, with HOME unset
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cache.Path, "home", no_account)
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path))
    assert cache.cache_folder().is_relative_to(tmp_path / f"baoc-{cache.user()}")


class TestWhoseLibraryItIs:
    """What another user could have planted, and what is no longer what was built, is never loaded."""

    NAME = "plant"
    PLANTED = b"planted"

    @pytest.fixture
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "cache"))
        (tmp_path / "tmp").mkdir(mode=0o700)
        monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path / "tmp"))
        return tmp_path / "cache"

    def kept(self) -> Path:
        def make(path: Path) -> None:
            path.write_bytes(b"built")

        return build.cached_library(self.NAME, ["source"], make)

    def plant(self, folder: Path) -> Path:
        """A library where the real one would be, with a hash that agrees."""
        own = self.kept()
        folder.mkdir(parents=True, exist_ok=True)
        planted = folder / own.name
        planted.write_bytes(self.PLANTED)
        planted.with_suffix(".sha256").write_text(build.hash_of(planted))
        return planted

    def test_its_own_is_built_once(self, cache: Path) -> None:
        first = self.kept()
        first.write_bytes(b"built")  # the same bytes
        times = first.stat().st_mtime_ns
        assert self.kept() == first and first.parent == cache and first.stat().st_mtime_ns == times
        assert oct(cache.stat().st_mode & 0o777) == "0o700"

    def test_what_starts_at_once_is_built_once(self, cache: Path) -> None:
        """Also by two containers that share a cache, whose processes have one number."""
        made: list[Path] = []

        def make(path: Path) -> None:
            made.append(path)
            sleep(0.1)
            path.write_bytes(b"built")

        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda _: build.cached_library(self.NAME, ["source"], make), range(4)))
        assert found == made * 4 and made[0].parent == cache
        assert sorted(path.suffix for path in cache.iterdir()) == [".sha256", ".so"]

    def test_it_is_built_without_a_lock_that_another_keeps(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(build, "monotonic", count(step=1000).__next__)
        cache.mkdir(mode=0o700)
        held = os.open(cache, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
        assert self.kept().read_bytes() == b"built"
        os.close(held)

    @pytest.mark.parametrize("mode", [0o777, 0o757, 0o1777, 0o772])
    def test_a_folder_that_others_may_write_is_left(
        self, cache: Path, mode: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("baoc.cache.is_own_group", lambda group: False)
        planted = self.plant(cache)
        cache.chmod(mode)
        found = self.kept()
        assert found.read_bytes() == b"built" and found.parent == cache.parent / "tmp" / f"baoc-{os.getuid()}"
        assert planted.read_bytes() == self.PLANTED
        assert f"{cache} may be written by other users: libraries of the native step are not kept there" in caplog.text

    def test_so_is_one_whose_parents_they_may_replace(self, cache: Path) -> None:
        self.plant(cache / "inner")
        cache.chmod(0o777)
        assert why_others_can_write(cache / "inner") == f"{cache} may be written by other users"
        cache.chmod(0o1777)  # as /tmp: what lies there stays its owner's
        assert why_others_can_write(cache / "inner") is None

    @pytest.mark.parametrize("target", ["cache", "nowhere"])
    def test_a_link_that_leads_nowhere_is_told(self, cache: Path, target: str) -> None:
        cache.symlink_to(cache.with_name(target) if target != "cache" else cache)
        assert why_others_can_write(cache) == f"{cache} is a symbolic link that leads nowhere"
        assert read_private(cache / "x") is None

    def test_a_group_of_the_user_alone_is_the_user(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        cache.mkdir(mode=0o700)
        cache.chmod(0o775)
        for own in (True, False):
            monkeypatch.setattr("baoc.cache.is_own_group", lambda group, own=own: own)
            assert (why_others_can_write(cache) is None) == own

    @pytest.mark.parametrize("place", ["cache", "fallback"])
    @pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
    def test_what_belongs_to_another_user_is_left(
        self, cache: Path, place: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fallback = cache.parent / "tmp" / f"baoc-{os.getuid()}"
        folder = cache if place == "cache" else fallback
        self.plant(folder)
        if place == "fallback":
            cache.chmod(0o777)
        os.chown(folder, 4321, 4321)
        found = self.kept()
        assert found.read_bytes() == b"built" and found.parent != folder
        assert found.parent.parent == cache.parent / "tmp"

    @pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
    def test_a_link_of_another_user_is_not_followed(self, cache: Path, tmp_path: Path) -> None:
        theirs, fallback = tmp_path / "theirs", tmp_path / "tmp" / f"baoc-{os.getuid()}"
        self.plant(theirs)
        cache.chmod(0o777)
        fallback.symlink_to(theirs)
        os.chown(fallback, 4321, 4321, follow_symlinks=False)
        found = self.kept()
        assert found.read_bytes() == b"built" and not found.is_relative_to(theirs)
        assert found.parent.name.startswith("baoc-") and found.parent not in (theirs, fallback)

    @pytest.mark.parametrize("shared", [False, True])
    def test_torchs_compiler_loads_no_code_from_a_folder_of_others(
        self, cache: Path, tmp_path: Path, shared: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nor Triton's: `ensure_private_folder` alone is asked there, before the first launch."""
        monkeypatch.setattr("torch._inductor.async_compile.maybe_warm_pool", lambda: None)
        theirs = tmp_path / "theirs"
        theirs.mkdir()
        theirs.chmod(0o777 if shared else 0o700)
        for ask in (start_compiler, lambda: ensure_private_folder("TRITON_CACHE_DIR", theirs)):
            for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
                monkeypatch.setenv(variable, str(theirs))
            ask()
            changed = {os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"]} - {str(theirs)}
            names = {str(cache / name) for name in ("torchinductor_cache_dir", "triton_cache_dir")}
            assert len(changed) == shared and changed <= names
        if shared:
            cache.chmod(0o777)
            ensure_private_folder("TRITON_CACHE_DIR", theirs)
            assert os.environ["TRITON_CACHE_DIR"].startswith(str(tmp_path / "tmp" / "baoc-"))

    @pytest.mark.parametrize("change", ["torn", "swapped", "hash", "mode", "link", "owner"])
    def test_a_file_that_is_not_what_was_built_is_built_again(self, cache: Path, tmp_path: Path, change: str) -> None:
        found = self.kept()
        noted = found.with_suffix(".sha256")
        if change == "torn":
            found.write_bytes(b"bui")
        elif change == "swapped":
            found.write_bytes(b"other")
        elif change == "hash":
            noted.unlink()
        elif change == "mode":
            found.chmod(0o666)
        elif change == "link":
            (tmp_path / "elsewhere").write_bytes(self.PLANTED)
            noted.write_text(build.hash_of(tmp_path / "elsewhere"))
            found.unlink()
            found.symlink_to(tmp_path / "elsewhere")
        elif os.getuid() == 0:
            os.chown(found, 4321, 4321)
        made: list[Path] = []

        def make(path: Path) -> None:
            made.append(path)
            path.unlink(missing_ok=True)
            path.write_bytes(b"built")

        assert build.cached_library(self.NAME, ["source"], make).read_bytes() == b"built"
        assert made == [found] or (change == "owner" and os.getuid() != 0)
        assert noted.read_text() == build.hash_of(found)
