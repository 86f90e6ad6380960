"""The wheel stands alone: conf/, experiments/ and the data are in it, and its `baoc` is run.py."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("baoc-*.whl")
    return built


def test_it_holds_configuration_experiments_and_data(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, pattern in (("conf", "**/*.yaml"), ("experiments", "*.yaml"), ("sweeps", "*.yaml")):
        for file in (ROOT / folder).glob(pattern):
            assert f"baoc/_assets/{file.relative_to(ROOT)}" in names
    assert {
        "baoc/data/digits.npz",
        "baoc/data/python_library.txt.xz",
        "baoc/data/python_library.LICENSE",
        "baoc/kernels/cpp/step.cpp",  # compiled where it runs, with its headers
        "baoc/kernels/cpp/numbers.h",
        "baoc/frontier/assets/page.html",
        "baoc/frontier/assets/page.js",
        "hydra_plugins/baoc_sweeper.py",
    } <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "outputs/", "run.py"))]


def test_its_command_composes_without_a_checkout(wheel: Path, tmp_path: Path, run_python):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import sys\nfrom baoc.config import assets\nfrom baoc.cli.main import main\n"
        "print(assets.root())\n"
        "sys.exit(main(['--cfg', 'job', 'experiments=digits_state_25', 'budget=7.5gb', '--resolve']))"
    )
    done = run_python(code, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == str(tmp_path / "site" / "baoc" / "_assets")
    assert "name: 7.5gb" in done.stdout and "name: digits_state_25" in done.stdout


def test_it_installs_the_command_baoc(wheel: Path):
    (entry,) = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("entry_points.txt")]
    assert "baoc = baoc.__main__:main" in zipfile.ZipFile(wheel).read(entry).decode()
