"""Every study of sweeps/: it reads, its trials compose into runs of its task, and one of each kind is stepped."""

from pathlib import Path

import optuna
import pytest
import yaml
from optuna.trial import TrialState

from baoc.config import assets
from baoc.config.compose import compose
from baoc.config.from_hydra import from_hydra
from baoc.config.schema import RunConfig
from baoc.sweep.sampling import make_sampler, suggest
from baoc.sweep.study import run_study
from baoc.sweep.study_config import StudyConfig, read_study
from baoc.tasks import TASKS
from tests.support.experiment_words import OF_MODEL, SMALL

pytestmark = pytest.mark.slow

STUDIES = assets.option_files("sweeps")
FIRST: dict[tuple[str, ...], str] = {}  # baseline -> the study of which it is composed, where several have it
for option, file in STUDIES.items():
    for baseline in yaml.safe_load(file.read_text())["hydra"]["sweeper"].get("baselines") or ():
        FIRST.setdefault(tuple(baseline), option)
QUALITY = {"vision": "val/loss", "language": "val/bpb", "diffusion": "val/mse"}


def study_of(name: str, **changes: object) -> StudyConfig:
    return read_study(yaml.safe_load(STUDIES[name].read_text())["hydra"]["sweeper"] | changes)


def run_of(words: list[str]) -> RunConfig:
    return from_hydra(compose(words))


def test_there_is_a_frontier_and_a_calibration_for_each_task():
    trained_from_nothing = set(TASKS) - {"masked"}  # which fine-tunes networks that are the user's own
    assert {f"{kind}_{task}" for kind in ("frontier", "risk_weights") for task in trained_from_nothing} <= set(STUDIES)


@pytest.mark.parametrize("name", STUDIES)
def test_what_a_study_proposes_composes_and_validates_at_its_rungs(name: str):
    config = study_of(name)
    assert config.name == name
    task = name.rsplit("_", 1)[1]
    drawn = [list(words) for words in config.baselines if FIRST[tuple(words)] == name]
    study = optuna.create_study(sampler=make_sampler(config, number=0))
    drawn.append(suggest(study.ask(), config))
    repeats = list(config.repeats) or [()]
    for number in range(max(len(drawn), len(repeats))):
        run = run_of([*config.fixed, *drawn[number % len(drawn)], *repeats[number % len(repeats)]])
        assert run.task.name == task
    for rung in config.early_stop.rungs:
        assert rung % int(run.trainer.val_check_interval or 0) == 0 and rung < run.trainer.max_steps
        assert config.early_stop.metric == QUALITY[task]


@pytest.mark.parametrize("name", ["frontier_language", "risk_weights_vision"])
def test_a_study_is_stepped(name: str, tmp_path: Path):
    """The trial after the baselines, with a small network and two steps."""
    config = study_of(name, n_trials=1, workers=1, baselines=[], sampler="random")
    model = run_of(list(config.fixed)).model.name
    small = [*SMALL, *OF_MODEL[model], "reallocation.warmup_steps=2"]
    repeats = [list(words) for words in config.repeats[:2]]
    config = study_of(
        name, n_trials=1, workers=1, baselines=[], sampler="random", fixed=[*config.fixed, *small], repeats=repeats
    )
    (trial,) = run_study(config, folder=tmp_path).trials
    log = "\n".join(file.read_text() for file in tmp_path.rglob("trial.log"))
    assert trial.state is TrialState.COMPLETE, log
    assert len(list(tmp_path.rglob("result.json"))) == max(len(repeats), 1)
