"""What is no error of ours has one exit code and one message too; only a bug shows its traceback."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.errors import MissingConfigException
from omegaconf.errors import ConfigAttributeError, InterpolationKeyError

from baoc.cli.failures import failure_of, report
from baoc.cli.hydra_errors import translate_error
from baoc.core import own_code
from baoc.errors import BadInputError


@pytest.fixture(autouse=True)
def _no_own_code() -> None:
    """An error is also the user's own code's where some was loaded, as by a test before."""
    own_code.forget_used()


class OutOfMemoryError(RuntimeError):
    """Stands in for torch.OutOfMemoryError, which is known by its name so that torch need not be imported."""


class MisconfigurationException(Exception):
    """Stands in for Lightning's, for the same reason."""


@pytest.mark.parametrize(
    ("error", "exit_code", "message"),
    [
        (OutOfMemoryError("CUDA out of memory. Tried\nmore"), 4, "out of memory: CUDA out of memory. Tried\nset a "),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: x"), 4, "out of memory: DefaultCPUAllocator"),
        (MemoryError(), 4, "out of memory: the machine has none left"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 4, "out of memory: [Errno 12] Cannot allocate memory"),
        (RuntimeError("can't start new thread"), 4, "out of memory: can't start new thread"),
        (ImportError("x.so: failed to map segment from shared object"), 4, "out of memory: x.so: failed to map"),
        (OSError(errno.ENOSPC, "No space left", "/x/y"), 2, "no space left for y in /x: free space"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 2, "cannot open or write /x: Permission denied"),
        (FileExistsError(errno.EEXIST, "File exists", "/x"), 2, "cannot open or write /x: File exists"),
        (OSError(errno.ELOOP, "Too many levels", "/x"), 2, "cannot open or write /x: Too many levels"),
        (OSError(errno.EIO, "Input/output error", "/x"), 5, "cannot read or write /x: Input/output error: the disk or"),
        (OSError(errno.ENODATA, "No data available"), 5, "cannot read or write: No data available"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), 2, "folder that the command runs in is gone"),
        (RuntimeError("Could not determine home directory."), 2, "begins with ~ and names no home folder"),
        (InterpolationKeyError("Interpolation key 'a' not found\nmore"), 2, "refers to what is not there: Inter"),
        (MisconfigurationException("no profiler foo"), 2, "Lightning refuses what `trainer` has: no profiler foo"),
        (ModuleNotFoundError("x", name="optuna.study"), 2, "needs optuna, which is not installed: pip install 'baoc["),
        (ModuleNotFoundError("x", name="PIL.Image"), 2, "needs PIL, which is not installed: pip install 'baoc[data]'"),
        (ModuleNotFoundError("x", name="pyarrow.parquet"), 2, "pyarrow, which is not installed: pip install 'baoc[d"),
        (ModuleNotFoundError("x", name="peft"), 2, "needs peft, which is not installed: pip install 'baoc[lora]'"),
        (ModuleNotFoundError("x", name="baoc.nowhere"), 1, "this is a bug in baoc"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (SystemExit(2), 2, ""),
        (SystemExit(None), 0, ""),
        (SystemExit("stop"), 1, "stop"),
        (ZeroDivisionError("division"), 1, "ZeroDivisionError: division\nthis is a bug in baoc: please report it"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/x"), 1, "this is a bug in baoc"),
        (FileNotFoundError("Couldn't find any data file at /x"), 1, "Couldn't find any data file at /x"),  # a library's
        (ConfigAttributeError("Missing key name"), 1, "this is a bug in baoc"),
    ],
)
def test_exit_code_and_message(error: BaseException, exit_code: int, message: str):
    failure = failure_of(error)
    assert failure.exit_code == exit_code
    assert message in failure.message
    assert bool(failure.details) == (exit_code == 1 and not isinstance(error, SystemExit))


@pytest.mark.parametrize("make", [Path.mkdir, os.makedirs])
def test_a_folder_that_cannot_be_made_is_named_whatever_the_system_says(make: Callable[..., None], tmp_path: Path):
    (tmp_path / "file").touch()
    for path, reason in (
        (Path("/proc/none"), "No such file or directory"),
        (tmp_path / "file", "File exists"),
        (tmp_path / "file" / "below", "Not a directory"),
        (tmp_path / ("long" * 80), "File name too long"),
    ):
        with pytest.raises(OSError) as caught:
            make(path)
        failure = failure_of(raised(RuntimeError("compiling failed"), caught.value))
        assert failure.exit_code == 2
        assert failure.message.startswith(f"cannot make the folder {path}: {reason}; name another one (hydra.run.dir=")


def raised(outer: BaseException, inner: BaseException) -> BaseException:
    try:
        try:
            raise inner
        except BaseException:
            raise outer  # noqa: B904 - the implicit context is what is tested
    except BaseException as error:
        return error


def test_causes_count_wherever_they_stand():
    assert failure_of(raised(SystemExit(1), KeyboardInterrupt())).exit_code == 130, (
        "Lightning turns Ctrl-C into an exit"
    )
    full = raised(RuntimeError("PytorchStreamWriter failed"), OSError(errno.ENOSPC, "No space left on device"))
    assert "no space left" in failure_of(full).message
    assert failure_of(raised(ValueError("x"), KeyError("y"))).exit_code == 1


def test_a_bug_shows_its_traceback_and_others_do_not(capsys):
    report(failure_of(raised(ValueError("x"), KeyError("y"))), where="run 3: ")
    shown = capsys.readouterr().err
    assert "Traceback" in shown and "baoc: error: run 3: ValueError: x" in shown
    report(failure_of(BadInputError("budget=x")))
    assert capsys.readouterr().err == "baoc: error: budget=x\n"
    report(failure_of(SystemExit(0)))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("option", "extra"), [("joblib", "launchers"), ("submitit_slurm", "launchers"), ("ray", "ray")]
)
def test_a_launcher_that_is_not_installed_is_told_with_its_extra(option: str, extra: str):
    told = translate_error(MissingConfigException("", f"hydra/launcher/{option}", ["basic"]))
    plugin = f"hydra-{option.partition('_')[0]}-launcher"
    assert f"hydra/launcher={option} needs {plugin}, which is not installed: pip install 'baoc[{extra}]'" == str(told)


def test_a_misspelled_launcher_is_no_missing_package():
    told = translate_error(MissingConfigException("", "hydra/launcher/submitit_loca", ["submitit_local"]))
    assert "there is no such hydra/launcher" in str(told)
