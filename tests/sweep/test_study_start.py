"""What a study pays once and a trial does not pay again: imports of its networks, and composing twice."""

from importlib.util import find_spec

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra

from baoc.cli import jobs
from baoc.cli.main import main
from baoc.models import MODELS
from baoc.sweep import study
from baoc.sweep.study_config import read_study
from baoc.sweep.trial_process import COMMAND


def model_modules(**given: object) -> list[str]:
    known = {"name": "s", "objectives": {"quality": "minimize"}, "space": {"seed": {"choices": [0, 1]}}}
    return study.model_modules(read_study(known | given))


def test_only_networks_that_overrides_name_are_imported_beforehand():
    assert model_modules() == []
    assert model_modules(fixed=["model=dit", "optim.lr=1e-3"]) == ["baoc.models.dit"]
    both = model_modules(space={"model": {"choices": ["vit", "llama"]}}, repeats=[["model=vit"], ["seed=1"]])
    assert both == [module for name in ("vit", "llama") for module in (MODELS[name].module, *MODELS[name].imports)]
    assert model_modules(baselines=[["model=unheard_of"]]) == [], "a trial of it says what is wrong"


@pytest.mark.parametrize("name", MODELS)
def test_what_a_network_imports_is_there(name):
    for module in MODELS[name].imports:
        assert find_spec(module) is not None


@pytest.mark.parametrize(("single", "times"), [(True, 1), (False, 2)])
def test_a_trial_is_composed_once(monkeypatch, tmp_path, single, times):
    """Hydra composes a second time to read hydra.mode; a trial is one run, whatever that says."""
    composed, get_mode = [], Hydra.get_mode
    load = ConfigLoaderImpl.load_configuration

    def counted(self, *args, **options):
        composed.append(1)
        return load(self, *args, **options)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", counted)
    seen = []
    monkeypatch.setattr(jobs, "run_job", lambda config: seen.append(config.budget.name))
    assert main(["budget=7.5gb", f"hydra.run.dir={tmp_path}"], single=single) == 0
    assert seen == ["7.5gb"] and len(composed) == times
    assert Hydra.get_mode is get_mode
    assert "single=True" in COMMAND


@pytest.mark.slow
def test_a_long_tmpdir_is_no_fault_of_a_study(tmp_path, run_python):
    """A socket's path has at most 107 bytes."""
    long = tmp_path / ("x" * 90)
    long.mkdir()
    code = (
        "import sys\nfrom tests.support.studies import STUB, config\nfrom baoc.sweep.study import run_study\n"
        "print(len(run_study(config(n_trials=1), folder=sys.argv[1], code=STUB).best_trials))"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    done = run_python(str(script), str(tmp_path / "study"), TMPDIR=str(long))
    assert done.returncode == 0 and done.stdout.endswith("1\n"), done.stderr
