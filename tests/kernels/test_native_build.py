"""Compiling the native step: what happens without a compiler, with a broken one, and with several processes at once."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from baoc import cache
from baoc.errors import BadInputError
from baoc.kernels.cpp import build
from baoc.optim import BlockwiseOptimizer
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE_S

# Steps 1M elements once with the native step.
STEP = """
import torch
from baoc.optim import BlockwiseOptimizer
param = torch.nn.Parameter(torch.ones(1000, 1001))
optimizer = BlockwiseOptimizer([param], "adamw_int8", lr=0.5, weight_decay=0.0, backend="native")
param.grad = torch.ones_like(param)
optimizer.step()
print(sorted({choice.backend for choice in optimizer.roster.choices.values()}), f"{param[0, 0].item():.4f}")
"""


@pytest.fixture(autouse=True)
def found_anew(monkeypatch: pytest.MonkeyPatch):
    """The library is looked for once per process, so what a test found must not stay."""
    monkeypatch.setattr(build, "loaded", None)
    build.library_or_why.cache_clear()
    yield
    build.library_or_why.cache_clear()


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(build.CACHE, str(tmp_path / "cache"))


def stepped(backend: str, *, rows: int = 1000) -> str:
    """What steps about a million elements once, and where that brings them."""
    param, other = nn.Parameter(torch.ones(rows, 1001)), nn.Parameter(torch.ones(10))
    optimizer = BlockwiseOptimizer([param, other], "adamw_int8", lr=0.5, weight_decay=0.0, backend=backend)
    param.grad = torch.ones_like(param)
    optimizer.step()
    return f"{sorted({choice.backend for choice in optimizer.roster.choices.values()})} {param[0, 0].item():.4f}"


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


def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(build.Unavailable, match="names 'no-such-compiler', which is not found"):
        build.library()


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\ncase \"$*\" in *step.cpp*) echo 'out of luck' >&2; exit 1;; esac\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv(build.CACHE, str(tmp_path / "cache"))
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
    command = [sys.executable, "-c", STEP]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), build.CACHE: str(tmp_path / "cache")}
    started = [
        subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=PATIENCE_S) for process in started]
    assert [out for out, _ in said] == ["['native'] 0.5000\n"] * 2, said
    (kept,) = (tmp_path / "cache").iterdir()
    assert kept.suffix == ".so" and kept.stat().st_size > 10_000


def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch):
    build.library()
    build.library_or_why.cache_clear()

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("it is in the cache")

    monkeypatch.setattr(build, "compile_source", refuse)
    build.library()
    build.library_or_why.cache_clear()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    with pytest.raises(AssertionError, match="it is in the cache"):
        build.library()


def test_a_cache_that_cannot_be_written_gives_way_to_temporary_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(build.CACHE, str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    written = []
    monkeypatch.setattr(build, "compile_source", lambda command, *, target: written.append(target))
    monkeypatch.setattr(build, "load", lambda path: path)
    assert build.library() == written[0]
    assert written[0].parent.parent == tmp_path and written[0].parent.name.startswith("baoc-")


def test_the_cache_is_where_the_platform_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv(cache.CACHE)
    monkeypatch.setattr(cache.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / "baoc"
    monkeypatch.setattr(cache.sys, "platform", "darwin")
    assert cache.cache_folder() == Path.home() / "Library" / "Caches" / "baoc"
