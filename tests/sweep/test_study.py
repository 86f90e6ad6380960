"""Studies whose trials are stubs: totals, kills, retries, constraints, and what is refused."""

import re
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from baoc.config.compose import compose
from baoc.errors import BadInputError
from baoc.sweep.sampling import SearchedTrials, make_sampler, suggest
from baoc.sweep.space_check import check_space, covering_points
from baoc.sweep.storage import next_trial, open_study
from baoc.sweep.study import add_overrides, make_study_folder, run_study
from baoc.sweep.study_config import read_study
from baoc.sweep.trial_outcome import WORST
from hydra_plugins.baoc_sweeper import SETTINGS
from tests.support.studies import STUB, attempts, config

pytestmark = pytest.mark.slow


def test_n_trials_is_the_total_and_a_second_run_begins_nothing_again(tmp_path: Path):
    study = run_study(config(n_trials=4), folder=tmp_path, code=STUB)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 4
    study = run_study(config(n_trials=6), folder=tmp_path, code=STUB)
    assert len(study.trials) == 6
    assert all(attempts(tmp_path, number) == ["new"] for number in range(6))
    for trial in study.trials:
        x = trial.params["x"]
        assert trial.values == pytest.approx([(x - 0.3) ** 2, int(100 * x)])


def test_baselines_come_first_and_once(tmp_path: Path):
    for total in (2, 3):
        study = run_study(
            config(n_trials=total, workers=1, baselines=[["x=0.25"], ["x=1"]]), folder=tmp_path, code=STUB
        )
    assert [trial.user_attrs["words"] for trial in study.trials][:2] == [["x=0.25"], ["x=1"]]
    assert len(study.trials) == 3 and study.trials[2].params


def test_a_start_that_was_killed_while_it_put_baselines_down_goes_on_with_the_rest(tmp_path: Path):
    given = config(n_trials=3, workers=1, baselines=[["x=0.25"], ["x=1"]], storage=None)
    begun = optuna.create_study(
        study_name="s", storage=f"sqlite:///{tmp_path / 'study.db'}", directions=["minimize", "minimize"]
    )
    begun.enqueue_trial({}, user_attrs={"overrides": ["x=0.25"]})
    study = run_study(given, folder=tmp_path, code=STUB)
    assert [trial.user_attrs["words"] for trial in study.trials][:2] == [["x=0.25"], ["x=1"]]
    assert len(study.trials) == 3 and study.trials[2].params


def test_a_killed_trial_goes_on_under_its_number_from_its_checkpoint(tmp_path: Path):
    study = run_study(config(n_trials=3, fixed=["mode=die_once"]), folder=tmp_path, code=STUB)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 3
    for number in range(3):
        assert attempts(tmp_path, number) == ["new", str(tmp_path / f"{number:04d}")]


def test_a_trial_that_dies_again_and_again_fails_and_the_others_finish(tmp_path: Path):
    study = run_study(config(n_trials=4, baselines=[["x=0.1", "mode=die"]], retries=2), folder=tmp_path, code=STUB)
    assert [trial.state for trial in study.trials] == [TrialState.FAIL] + [TrialState.COMPLETE] * 3
    assert len(attempts(tmp_path, 0)) == 3


def test_an_impossible_budget_is_a_constraint_and_bad_input_a_failure(tmp_path: Path):
    baselines = [["x=0.1", "mode=infeasible"], ["x=0.1", "mode=bad"]]
    study = run_study(config(n_trials=3, baselines=baselines, sampler="tpe"), folder=tmp_path, code=STUB)
    infeasible, bad, good = study.trials
    assert infeasible.state is TrialState.COMPLETE and infeasible.values == [WORST, WORST]
    assert bad.state is TrialState.FAIL and good.state is TrialState.COMPLETE
    assert [trial.number for trial in study.best_trials] == [good.number]


def test_what_diverged_is_a_violated_constraint_and_on_no_front(tmp_path: Path):
    baselines = [["x=0", "mode=diverge"], ["x=0", "mode=nan"]]  # the fewest bytes of all
    study = run_study(config(n_trials=3, baselines=baselines), folder=tmp_path, code=STUB)
    diverged, nan, good = study.trials
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 3
    assert diverged.constraints["diverged"] > 0 and nan.constraints["diverged"] > 0
    assert good.constraints == {"budget": 0.0}
    assert [trial.number for trial in study.best_trials] == [good.number]


@pytest.mark.parametrize("sampler", ["tpe", "nsgaii", "random"])
def test_a_setting_that_does_not_matter_is_not_searched(sampler: str, tmp_path: Path):
    space = {"kind": {"choices": ["a", "b"]}, "x": {"low": 0.0, "high": 1.0}}
    space["depth"] = {"choices": [1, 2], "when": {"kind": "a"}}
    given = config(n_trials=12, seed=1, sampler=sampler, space=space, baselines=[["x=0.5"]])
    study = open_study(given, folder=tmp_path)
    while (trial := next_trial(study, config=given, folder=tmp_path)) is not None:
        words = suggest(trial, given)
        assert ("depth" in trial.params) == (trial.params.get("kind") == "a")
        assert any(word.startswith("depth=") for word in words) == ("depth" in trial.params)
        study.tell(trial.number, [trial.number, trial.number])
    searched = [trial for trial in study.trials if trial.params]
    assert len(searched) == 11 and {trial.params["kind"] for trial in searched} == {"a", "b"}


def test_settings_are_searched_jointly_beside_baselines(tmp_path: Path):
    """Baselines have no point in the space; samplers that take what all trials share would search nothing jointly."""
    given = config(n_trials=3, workers=1, sampler="gp", baselines=[["x=0.25"]])
    study = run_study(given, folder=tmp_path, code=STUB)
    trial = optuna.trial.create_trial(state=TrialState.RUNNING)
    space = make_sampler(given, number=3).infer_relative_search_space(SearchedTrials(study), trial)
    assert list(space) == ["x"]


@pytest.mark.parametrize("follows_a_front", [False, True])
def test_a_trial_is_drawn_the_same_whatever_was_killed_before(follows_a_front: bool, tmp_path: Path):
    budgets = {"budget": {"low": 1.0, "high": 60.0}, "x": {"low": 0.0, "high": 1.0}}
    points = {"space": budgets, "baselines": [["budget=25.0", "x=0.5"]]} if follows_a_front else {}
    given = config(n_trials=8, workers=1, sampler="tpe", **points)
    whole = run_study(given, folder=tmp_path / "whole", code=STUB)
    for total in (6, 8):
        parts = run_study(replace(given, n_trials=total), folder=tmp_path / "parts", code=STUB)
    assert [trial.params for trial in parts.trials] == [trial.params for trial in whole.trials]
    assert len({trial.params["x"] for trial in parts.trials}) == 8


def test_fewer_impossible_budgets_are_proposed_later(tmp_path: Path):
    changes = {
        "n_trials": 20,  # the first five are drawn at random
        "seed": 1,
        "workers": 1,  # so that it proposes the same each time
        "sampler": "tpe",
        "fixed": ["mode=infeasible", "best=0.8"],
        "objectives": {"quality": "minimize"},
    }
    study = run_study(config(**changes), folder=tmp_path, code=STUB)
    low = [trial.params["x"] < 0.5 for trial in study.trials]
    assert sum(low[10:]) <= 2, low  # 5 by chance; at most 2 with any of 12 seeds


def test_another_space_or_other_objectives_are_refused_and_the_study_is_untouched(tmp_path: Path):
    run_study(config(n_trials=2), folder=tmp_path, code=STUB)
    with pytest.raises(BadInputError, match=r"study s has space.x.high 1.0 and was asked for 2.0: trials"):
        run_study(config(space={"x": {"low": 0.0, "high": 2.0}}), folder=tmp_path, code=STUB)
    with pytest.raises(BadInputError, match=r"has objectives.state_bytes minimize and was asked for none: trials"):
        run_study(config(objectives={"quality": "minimize"}), folder=tmp_path, code=STUB)
    assert len(open_study(config(n_trials=2), folder=tmp_path).trials) == 2


def test_a_grid_that_would_lack_points_is_refused_and_late_baselines_are_told(tmp_path: Path, capsys):
    points = {"x": {"choices": [0.1, None]}}
    open_study(config(n_trials=1, space=points), folder=tmp_path)
    with pytest.raises(BadInputError, match="begun with another sampler or other baselines, so 1 of the 2 trials"):
        open_study(config(n_trials=2, space=points, sampler="grid"), folder=tmp_path)
    open_study(config(n_trials=2, space=points, baselines=[["x=0.3"]]), folder=tmp_path)
    assert "has begun without the baselines x=0.3, which are not tried" in capsys.readouterr().out
    open_study(config(n_trials=2, space=points, baselines=[[]]), folder=tmp_path)
    assert "has begun without the baselines (no overrides), which are not tried" in capsys.readouterr().out
    param = config(space=points).space[0]
    assert param.override(None) == "x=null" and param.value_of("0.1") == 0.1


def test_a_study_has_one_folder_which_may_move(tmp_path: Path):
    shared = f"sqlite:///{tmp_path / 'all.db'}"
    open_study(config(n_trials=1, storage=shared), folder=make_study_folder(tmp_path / "a"))
    with pytest.raises(BadInputError, match=r"study s has its runs in .*/a, and .*/b is another folder: go on in that"):
        open_study(config(n_trials=2, storage=shared), folder=make_study_folder(tmp_path / "b"))
    moved = (tmp_path / "a").rename(tmp_path / "c")
    assert len(open_study(config(n_trials=2, storage=shared), folder=moved).trials) == 2
    with pytest.raises(BadInputError, match=r"has a '\?', at which a database's URL ends: .*storage=journal"):
        open_study(config(n_trials=1, storage=None), folder=make_study_folder(tmp_path / "what?"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampler": "tpu"}, "sampler=tpu is not allowed: choose .*did you mean tpe"),
        ({"objectives": {"speed": "maximize"}}, "objective 'speed'"),
        (
            {"objectives": {"state_bytes": "maximize"}},
            "objectives.state_bytes=maximize is not allowed: it must be minimize",
        ),
        ({"space": {"x": {"low": 1, "high": 0}}}, "low must be below high"),
        ({"space": {"x": {"low": 0.0, "high": 1.0}}, "sampler": "grid"}, "grid sampler needs choices"),
        ({"space": {"x": 3}}, "give choices, or low and high"),
        (
            {"space": {"x": {"choices": [1, 2], "low": 0}}},
            "space.x cannot have choices and a range: leave one of the two out$",
        ),
        ({"space": {"x": {"choices": [1, 2, 1]}}}, "space.x has the choice 1 twice: leave one out$"),
        ({"space": {"": {"low": 0, "high": 1}}}, r"space. names no setting: give one of a run, such as optim\.lr$"),
        ({"space": {"optim.": {"choices": [1]}}}, r"space.optim\. names no setting"),
        ({"fixed": ["x=3"]}, r"fixed has x=3, which hydra.sweeper.space.x overrules: leave one of the two out$"),
        ({"space": {"x": {"choices": [1], "when": {"y": 1}}}}, "x.when names y: allowed are settings"),
        ({"early_stop": {"rungs": [20, 10]}}, "give rising optimizer steps"),
        ({"early_stop": {"margin": -1}}, "early_stop.margin=-1 is not allowed: it must be zero or more"),
        (
            {"early_stop": {"rung": 1}},
            "unknown key hydra.sweeper.early_stop.rung; did you mean hydra.sweeper.early_stop.rungs",
        ),
        ({"n_trials": 0}, "n_trials=0 is not allowed: it must be 1 or more trials"),
        ({"nTrials": 3}, r"unknown key hydra.sweeper.nTrials; did you mean hydra.sweeper.n_trials\?"),
        ({"baselines": 3}, "baselines=3 is not allowed: it must be a list, each entry a list, each entry text$"),
        ({"workers": 10**9}, "workers=1000000000 is not allowed: it must be 1 to 1024 processes$"),
        ({"gpus": True}, "gpus=true is not allowed: it must be text or a list"),
        ({"space": {"x": {"choices": []}}}, r"x.choices=\[\] is not allowed: it must be a list of at least one value$"),
        ({"space": {"x": {"choices": "ab"}}}, "x.choices=ab is not allowed: it must be a list, each entry a value$"),
        ({"space": {"x": {"low": 0, "high": 9, "step": -1}}}, "x.step=-1 is not allowed: it must be above 0$"),
        ({"space": {"x": {"low": 1, "high": 9, "step": 2, "log": True}}}, "a logarithmic range has no steps"),
        ({"space": {"x": {"low": 1, "high": 9, "step": 1.5}}}, "has step=1.5: give a whole number of at most high"),
        ({"space": {"x": {"low": 1, "high": 9, "stop": 1}}}, "unknown key hydra.sweeper.space.x.stop; did you mean"),
        ({"space": {}}, "no hydra.sweeper.space"),
        ({"space": {"x": {"choices": ["a"], "format": "{:.3g}"}}}, "x.format='{:.3g}' does not write its values"),
        ({"space": {"x": {"choices": [[1], 1.0], "format": "{:.3g}"}}}, "does not write its values"),
        ({"space": {"x": {"choices": [1]}, "z": {"choices": [1], "when": {"x": [2]}}}}, "of which none is ever drawn"),
        ({"space": {"x": {"low": 1, "high": 2, "format": "{}_{}"}}}, "does not write its values .*give one place"),
    ],
)
def test_what_a_study_cannot_be(changes: dict[str, object], message: str):
    with pytest.raises(BadInputError, match=message):
        config(**changes)


def test_fixed_may_set_what_is_drawn_under_a_condition():
    space = {"kind": {"choices": ["a", "b"]}, "x": {"choices": [1, 2], "when": {"kind": "a"}}}
    assert config(space=space, fixed=["x=3"]).fixed == ("x=3",)


def test_several_values_beside_a_study_are_refused(tmp_path: Path):
    with pytest.raises(BadInputError, match="several values beside sweeps=s"):
        run_study(config(), folder=tmp_path, extra=["seed=0,1"], code=STUB)
    with pytest.raises(BadInputError, match="mode=plan trains nothing, and the trials of sweeps=s are compared"):
        run_study(config(), folder=tmp_path, extra=["mode=plan"], code=STUB)
    with pytest.raises(BadInputError, match="several values beside sweeps=s"):
        add_overrides(config(), ["seed=range(3)"])
    one = ["name='a,b'", "~logger", "blocks.patterns=[a,b]"]
    assert add_overrides(config(), ["sweeps=s", *one]).fixed == tuple(one)


@pytest.mark.parametrize("word", ["x=0.2", "+x=0.2", "~x", "seed=3", "model=vit"])
def test_what_the_study_sets_itself_is_not_overruled_in_silence(word: str):
    study = config(baselines=[["seed=1"]], repeats=[["model=dit"]])
    with pytest.raises(BadInputError, match=rf"^{re.escape(word)} is overruled by hydra.sweeper.(space|baselines|rep)"):
        add_overrides(study, [word])
    assert add_overrides(study, ["optim.lr=0.1", "hydra.sweeper.seed=1"]).fixed == ("optim.lr=0.1",)


@pytest.mark.parametrize("content", ['{"name": "s', "", "[1]", None], ids=str)
def test_a_damaged_study_file_is_written_again(content: str | None, tmp_path: Path):
    folder = make_study_folder(tmp_path / "a")
    open_study(config(n_trials=1), folder=folder)
    whole = (folder / "study.json").read_text()
    (folder / "study.json").unlink()
    if content is not None:
        (folder / "study.json").write_text(content)
    assert len(open_study(config(n_trials=1), folder=folder).trials) == 1
    assert (folder / "study.json").read_text() == whole


def test_what_changed_since_a_study_began_is_told(tmp_path: Path, capsys):
    open_study(config(n_trials=1), folder=tmp_path)
    assert "was begun with" not in capsys.readouterr().out
    open_study(config(n_trials=1, seed=7, sampler="nsgaii"), folder=tmp_path)
    said = capsys.readouterr().out
    assert "was begun with sampler random: trials that are left are drawn with nsgaii" in said
    assert "was begun with seed 0: trials that are left are drawn with 7" in said


def test_every_setting_of_a_study_can_be_given_on_the_command_line():
    needed = {"name": "s", "objectives": {"quality": "minimize"}, "space": {"x": {"choices": [1]}}}
    assert read_study({**SETTINGS, **needed}) == read_study(needed), "the same defaults"


def test_a_command_line_may_nest_what_a_file_writes_with_dots():
    space = {"optim.lr": {"low": 0.001, "high": 0.1, "log": True}, "risk": {"low": 0, "high": 1}}
    nested = {"optim": {"lr": {"low": 0.01}, "eps": {"choices": [1e-8]}}, "risk": {"choices": ["prior"]}}
    given = {param.key: param for param in config(space={**space, "optim": nested["optim"]}).space}
    assert list(given) == ["optim.lr", "risk", "optim.eps"]
    assert (given["optim.lr"].low, given["optim.lr"].high, given["optim.lr"].log) == (0.01, 0.1, True)
    risk, prior = space["risk"], nested["risk"]
    assert config(space={"a": {"risk": risk}, "a.risk": prior}).space[0].choices == ("prior",)
    assert config(space={"a.risk": prior, "a": {"risk": risk}}).space[0].choices == ()


@pytest.mark.parametrize(
    ("key", "spec", "message"),
    [
        (
            "budgett",
            {"low": 1, "high": 2},
            "would try budgett=1, which is no run: unknown key budgett",
        ),
        ("risk", {"choices": ["prior", "statistic"]}, "risk=statistic: there is no such risk"),
        ("budget", {"low": 1, "high": 2, "format": "stat_{}"}, "cannot read budget=stat_1"),
    ],
)
def test_a_space_that_is_no_runs_is_refused_before_anything_trains(key: str, spec: dict[str, object], message: str):
    with pytest.raises(BadInputError, match=message):
        check_space(config(space={key: spec}, fixed=["model=vit"]), compose=compose)


def test_points_hold_every_choice_and_leave_out_what_does_not_matter():
    space = {
        "allocator": {"choices": ["exact", "random", "lagrangian"]},
        "risk": {"choices": ["prior", "statistics"], "when": {"allocator": ["exact", "lagrangian"]}},
        "optim.lr": {"low": 0.5, "high": 1.0},
    }
    assert covering_points(config(space=space).space) == [
        ["allocator=exact", "risk=prior", "optim.lr=0.5"],
        ["allocator=random", "optim.lr=0.5"],
        ["allocator=lagrangian", "risk=prior", "optim.lr=0.5"],
        ["allocator=exact", "risk=statistics", "optim.lr=0.5"],
    ]
    nested = {"a": {"choices": ["x", "y"]}, "b": {"choices": ["p", "q"], "when": {"a": ["y"]}}}
    nested["c"] = {"choices": ["m", "n"], "when": {"b": ["q"]}}
    assert ["a=y", "b=q", "c=n"] in covering_points(config(space=nested).space)


@pytest.mark.parametrize("key", ["repeats", "baselines"])
def test_repeats_and_baselines_are_composed_as_well(key: str):
    changes = {key: [["seed=0"], ["seeed=1"]]}
    with pytest.raises(BadInputError, match=rf"unknown key seeed(.|\n)*correct hydra.sweeper.{key}"):
        check_space(config(space={"seed": {"choices": [1]}}, fixed=["model=vit"], **changes), compose=compose)
