"""Races as studies of stub runs: table and record, kills, caps, equal seconds, and what is refused."""

import csv
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baoc.cli.jobs import RACE_SETUP_FILE, with_race_command
from baoc.config.compose import compose
from baoc.config.from_hydra import from_hydra
from baoc.errors import BadInputError, TrainingFailedError
from baoc.racing.course import DONE, FAILED, OutOfTimeError, RaceSettings, RunEnd, course
from baoc.racing.entrants import ENTRANTS_FILE, read_target
from baoc.racing.records import RACE_FILE, RaceScale, find_race, race_family, resolve_raced_recipe
from baoc.racing.verdict import Entrant
from baoc.sweep import race as race_module
from baoc.sweep.gpu_slots import Gpu
from baoc.sweep.race import (
    Pace,
    RacePlan,
    RaceRun,
    inherited_overrides,
    predict_seconds,
    race_before_run,
    race_command,
    run_race,
)
from baoc.sweep.storage import open_study
from baoc.tracking.files import read_json
from tests.support.commands import start_script
from tests.support.races import NAMES, STUB, WORDS, attempts, config, write_target
from tests.support.waiting import wait_until

MOST_KILLS = int(os.environ.get("BAOC_KILLS", "3"))
# A journal takes a third of the processor seconds of sqlite, which kills are tried with.
QUICK = ("race.seeds=2", "race.confirm_seeds=3", "race.rates=[0.5,1]", "race.workers=2", "race.storage=journal")
ONE_STAGE = (
    "race.seeds=2",
    "race.confirm_seeds=2",
    "race.rates=[1]",
    "race.rungs=[1]",
    "race.workers=2",
    "race.storage=journal",
)


@pytest.fixture(autouse=True)
def without_page(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(race_module, "build_report", lambda *_, **__: None)  # stubs leave no run folders to compare


def raced(folder: Path, *words: str, cap_s: float | None = None, stages: tuple[str, ...] = ONE_STAGE):
    words = (*stages, *words)
    return run_race(
        config(folder, *words), overrides=[*WORDS, *words], folder=folder, command="c", code=STUB, cap_s=cap_s
    )


@pytest.mark.slow
def test_a_race_leaves_a_table_a_record_and_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_target(tmp_path)
    result = raced(tmp_path, stages=QUICK)
    assert result is not None
    record = json.loads((tmp_path / RACE_FILE).read_text())
    assert record["choice"] == "plan" and record["rate"] == 1.0 and record["lr"] == pytest.approx(3e-3)
    assert record["recipe"]["blocks"] == {"layers.0.mlp": "muon_int8"}
    assert record["verdict"]["rival"] == "muon8_lean" and record["verdict"]["difference"]["n"] == 3
    left = {row["name"]: row["left"] for row in record["entrants"] if row["left"]}
    assert left["adamw8"] == "does not fit (least feasible is 9 MiB)" and left["lion8"] == "it diverged"
    assert left["permuted"].startswith("behind muon8_lean")
    with (tmp_path / "race.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(attempts(tmp_path)) and len(rows[0]["folder"]) == 4
    assert {row["status"] for row in rows} == {"done", "does not fit", "diverged"}
    assert {(row["stage"], row["steps"]) for row in rows} == {
        ("25%", "100"),
        ("50%", "200"),
        ("100%", "400"),
        ("fresh", "400"),
    }
    assert not list(tmp_path.rglob("*.ckpt"))  # hundreds of runs would fill the disk
    shown = capsys.readouterr().out
    assert "P(plan is worse than the best uniform tried by more than" in shown and "<= 0.1 at 1,000 parameters" in shown
    assert read_json(next((tmp_path / "library").glob("*.json")))["choice"] == "plan"


@pytest.mark.slow
def test_the_same_command_goes_on_and_another_one_is_refused(tmp_path: Path):
    write_target(tmp_path, names=("muon8_lean", "foam8_lean"))
    first = raced(tmp_path)
    before = attempts(tmp_path)
    again = raced(tmp_path, "race.workers=1")
    assert first is not None and again is not None
    assert all(first[key] == again[key] for key in ("verdict", "entrants", "cut", "rate"))
    assert attempts(tmp_path) == before  # nothing was trained again
    with pytest.raises(BadInputError, match=r"holds a race with race.seeds=2, and runs of both cannot be compared"):
        raced(tmp_path, "race.seeds=3")
    with pytest.raises(BadInputError, match=r"holds a race with .*trainer.max_steps=400"):
        raced(tmp_path, "trainer.max_steps=500")
    words = with_race_command(["mode=race", f"resume={tmp_path}", "race.workers=2"])
    assert words[-1] == f"hydra.run.dir={tmp_path}" and "race.workers=2" in words and "race.workers=1" not in words
    assert "budget=state_25" in words and not any(word.startswith("resume=") for word in words)


@pytest.mark.slow
@pytest.mark.parametrize("third", ["new", "old"])
def test_a_race_whose_folder_was_moved_goes_on_there(third: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Moved on, or back, and each time killed with a run under way that has a recipe file of the race."""
    folder = tmp_path / "old" / "race"
    write_target(folder, names=("muon8_lean", "plan"))
    for hanging, begun, place in ((101, 4, "between"), (201, 8, third)):  # the last two of a stage hang
        script = tmp_path / f"{hanging}.py"
        script.write_text(SCRIPT.replace('"0.05")', f'"6000 if seed == {hanging} else 0")'))
        process = start_script(script, str(folder), *ONE_STAGE, folder=tmp_path / "log").process
        wait_until(lambda at=folder, n=begun: len(list(at.glob("*/process"))) == n, what=f"{begun} runs")
        process.kill()
        process.join()
        (tmp_path / place).mkdir(exist_ok=True)
        shutil.move(folder, folder := tmp_path / place / "race")
    result = raced(folder)
    assert result is not None and result["choice"] == "plan"
    assert not any(row["left"] for row in result["entrants"]) and "has begun without" not in capsys.readouterr().out
    assert [len(lines) for lines in attempts(folder).values()][:4] == [1, 1, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["null", "journal", "shared"])
def test_a_race_goes_on_without_its_study_file(storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its study has a name of earlier versions. Where the storage lies in the folder, that may have been moved too."""
    folder, other = tmp_path / "a" / "race", tmp_path / "b" / "race"
    words = (f"race.storage={f'sqlite:///{tmp_path}/shared.db' if storage == 'shared' else storage}",)
    for place in (other, folder):
        write_target(place, names=("muon8_lean",))
        with monkeypatch.context() as patch:
            patch.setattr(race_module, "stored_name", lambda *_, place=place, **__: f"race_{place.parent.name}_race")
            assert raced(place, *words) is not None
    before = attempts(folder)
    for damaged in (None, "{", '{"name": 3}'):
        (folder / "study.json").unlink() if damaged is None else (folder / "study.json").write_text(damaged)
        if storage != "shared":
            shutil.move(folder, folder := folder.with_name(f"{folder.name}s"))
        assert raced(folder, *words) is not None and attempts(folder) == before
        assert read_json(folder / "study.json")["name"] == "race_a_race"


@pytest.mark.slow
def test_a_stage_opens_its_study_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Otherwise what `open_study` says would stand there twice."""
    opened: list[int] = []
    for module in ("race", "study"):
        monkeypatch.setattr(
            f"baoc.sweep.{module}.open_study",
            lambda config, **places: opened.append(config.n_trials) or open_study(config, **places),
        )
    write_target(tmp_path, names=("muon8_lean", "foam8_lean"))
    assert raced(tmp_path) is not None
    assert opened == [4, 8]


@pytest.mark.slow
def test_a_library_that_takes_nothing_costs_no_race(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_target(tmp_path / "race", names=("muon8_lean",))
    (tmp_path / "file").write_text("in the way")
    assert raced(tmp_path / "race", f"race.library={tmp_path / 'file'}") is not None
    assert (tmp_path / "race" / RACE_FILE).is_file()
    assert "not kept for recipe=raced (cannot write" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_race_of_an_earlier_version_goes_on_with_the_seconds_of_its_plan(tmp_path: Path, monkeypatch):
    """New settings had their defaults, removed ones too, and seconds count though no run had ended before a kill."""
    now = time.monotonic()
    monkeypatch.setattr(race_module, "time", SimpleNamespace(monotonic=lambda: now))
    words = ("budget.schedule=[{step: 50, budget: state_10}]",)

    def begun(*more: str) -> race_module.RaceRun:
        given = (*words, *more)
        race = race_module.RaceRun(config(tmp_path, *given), overrides=given, folder=tmp_path, command="c", code="")
        race.study = SimpleNamespace(get_trials=lambda **_: [])  # pyright: ignore[reportAttributeAccessIssue]
        race.started = now - 30.0
        race.check_setup()
        return race

    assert begun().elapsed_s() == 30.0
    file = tmp_path / RACE_SETUP_FILE
    kept = json.loads(file.read_text())
    settings = kept["settings"]
    del settings["trainer"]["strategy"]
    settings["trainer"]["reshard_after_forward"] = True
    settings["reallocation"] |= {"update_rms": "usual", "interval": 100}
    settings["budget"]["relaxation"] = {"from_step": None, "every": 100, "calm": 0.5, "max_risk": 0.1}
    settings["budget"]["schedule"][0]["batch"] = None
    assert settings["blocks"]["by"] == "auto"
    settings["blocks"]["by"] = "layer_role"
    file.write_text(json.dumps(kept | {"plan_s": 60.0}))
    assert begun().elapsed_s() == 90.0
    with pytest.raises(BadInputError, match=r"holds a race with model.dropout=0.0, and runs"):
        begun("model.dropout=0.1")
    with pytest.raises(BadInputError, match=r"holds a race with budget.host_memory=none, and runs"):
        begun("+budget.host_memory=8gb")
    file.write_text(json.dumps(kept | {"words": [*words, "blocks=layer_role"]}))
    with pytest.raises(BadInputError, match=r"holds a race with blocks.by=layer_role, and runs"):
        begun()
    begun("blocks=layer_role")
    settings["optim"]["gone"] = 1
    file.write_text(json.dumps(kept))
    with pytest.raises(BadInputError, match=r"a race of another version of baoc.*unknown key optim.gone"):
        begun()


def test_no_sibling_is_timed_where_the_plan_has_taken_a_quarter_of_the_cap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write_target(tmp_path, names=("muon8_lean", "foam8_lean"), size="small")
    stub_timing(monkeypatch)
    race = race_module.RaceRun(config(tmp_path), overrides=[], folder=tmp_path, command="c", code="")
    race.target = read_target(tmp_path / ENTRANTS_FILE)
    timed: list[str] = []
    sibling = race.scale_of_size
    monkeypatch.setattr(race, "scale_of_size", lambda size: (timed.append(size), sibling(size))[1])
    race.plan_s = 60.0
    assert race.fit_cap(61.0) is None and not timed
    assert "nothing is raced within 61 s: planning and timing took 60 s, and the smallest" in capsys.readouterr().out
    race.plan_s = 0.0
    assert race.fit_cap(1.0) is None and timed == ["mini", "tiny"]


SCRIPT = """
import sys
from pathlib import Path
from baoc.sweep import race
from tests.support.races import STUB, WORDS, config
race.build_report = lambda *_, **__: None
folder, words = Path(sys.argv[1]), sys.argv[2:]
code = STUB.replace('words.get("task.sleep", 0)', "0.05")
race.run_race(config(folder, *words), overrides=[*WORDS, *words], folder=folder, command="c", code=code)
"""


@pytest.mark.slow
def test_kills_at_random_moments_change_nothing(tmp_path: Path):
    """Kills of the race and of its runs: the result is that of a race without any. BAOC_KILLS=20 has 20 of them."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for folder in (killed, whole):
        write_target(folder, names=("muon8_lean", "foam8_lean", "plan"))
    (script := tmp_path / "script.py").write_text(SCRIPT)
    words = [*ONE_STAGE, "race.rungs=[0.5,1]", "race.storage=null"]
    rng, kills, process = random.Random(3), 0, None
    for number in range(MOST_KILLS):
        if process is None or process.exitcode is not None:
            process = start_script(script, str(killed), *words, folder=tmp_path / "log").process
        begun = 1 + 10 * number // MOST_KILLS  # of 14 runs or more
        wait_until(lambda begun=begun: len(list(killed.glob("*/process"))) >= begun, what=f"run {begun}")
        time.sleep(rng.uniform(0.0, 0.3))
        if number % 2:
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(max(killed.glob("*/process")).read_text()), signal.SIGKILL)
                kills += 1
        elif process.exitcode is None:
            process.kill()
            process.join()
            kills += 1
    assert process is not None
    process.join()
    for folder in (killed, whole):
        run_race(config(folder, *words), overrides=[*WORDS, *words], folder=folder, command="c", code=STUB)
    assert kills >= 2
    one, other = (json.loads((folder / RACE_FILE).read_text()) for folder in (killed, whole))
    for changing in ("seconds", "commit", "command"):
        del one[changing], other[changing]
    assert one == other


@pytest.mark.slow
def test_a_cap_ends_a_race_before_the_stage_that_would_exceed_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_target(tmp_path, names=("muon8_lean", "foam8_lean", "plan"))
    assert raced(tmp_path, cap_s=1.0) is None  # 40 steps of 10 ms; a race of 400 takes minutes
    said = capsys.readouterr().out
    assert "nothing is raced within 1 s: planning and timing took" in said
    result = raced(tmp_path, cap_s=1000.0)
    assert result is not None and not result["cut"]


@pytest.mark.slow
def test_a_stage_that_is_slower_than_predicted_ends_before_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write_target(tmp_path, names=("muon8_lean", "foam8_lean", "plan"))
    study, calls = race_module.run_study, list[str]()

    def counted(*args: Any, **settings: Any):
        calls.append("timed" if not calls else "raced")
        return study(*args, **settings)

    monkeypatch.setattr(race_module, "run_study", counted)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 2e6 * calls.count("raced"))
    monkeypatch.setattr(race_module, "time", clock)
    many = ("race.seeds=3", "race.rates=[0.5,1]")  # 18 runs in the first stage, of which 12 go before a look
    assert raced(tmp_path, *many, cap_s=1e6) is None
    assert "6 more runs would not end within the cap of 1000000 s" in capsys.readouterr().out
    monkeypatch.setattr(race_module, "time", time)
    ended = attempts(tmp_path)
    assert raced(tmp_path, *many, cap_s=1e6) is not None
    assert ended.items() <= attempts(tmp_path).items()  # what had ended is not run again


def test_a_stage_is_predicted_by_starts_and_steps_apart():
    assert predict_seconds([100, 100], pace=Pace(0.01, 5.0), measured=[]) == 12.0
    assert predict_seconds([100, 100], pace=Pace(0.01, 5.0), measured=[(100, 12.0)]) == 24.0
    assert predict_seconds([100] * 6, pace=Pace(0.01, 5.0), workers=4) == 12.0, "two waves"


@pytest.mark.parametrize("mode", ["race", "train"])
def test_a_recipe_that_alone_fits_is_raced_for_its_rate_only_where_a_race_was_asked_for(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write_target(tmp_path, names=("muon8_lean",))
    stub_timing(monkeypatch)
    words = [f"mode={mode}", "race=1000", "race.workers=1"]
    race = race_module.RaceRun(config(tmp_path, *words), overrides=words, folder=tmp_path, command="c", code="")
    race.target = read_target(tmp_path / ENTRANTS_FILE)
    planned = race.fit_cap(1000.0)
    said = "nothing is raced: muon8_lean alone fits the budget" in capsys.readouterr().out
    assert (planned is None) == said == (mode == "train")
    if planned is not None:
        measured, racers, rates, cap_s = planned
        assert (measured.steps, [one.name for one in racers], rates, cap_s) == (
            400, ["muon8_lean"], race.config.race.rates, 1000.0
        )  # fmt: skip


def test_a_race_under_a_cap_that_races_nothing_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write_target(tmp_path, names=("muon8_lean", "foam8_lean"))
    stub_timing(monkeypatch)
    words = ("race=1", "race.workers=1")
    with pytest.raises(BadInputError, match=r"nothing was raced within race=1, and the lines above say why"):
        race_command(config(tmp_path, *words), overrides=[*WORDS, *words], folder=tmp_path, command="c")
    assert (
        "nothing is raced within 1 s: planning and timing took 0 s, and the smallest race is predicted"
        in capsys.readouterr().out
    )


def stub_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a timed run had taken 0.5 s, with 10 ms a step."""
    for name, value in {
        "_time_size": (0, {"step_ms": 10.0, "num_params": 1000}),
        "_trial_s": 0.5,
        "_training_s": 0.0,
    }.items():
        monkeypatch.setattr(race_module.RaceRun, name, lambda *_, value=value, **__: value)


@pytest.mark.slow
def test_before_a_run_the_choice_and_its_rate_are_trained_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(race_module, "find_spec", lambda _: None)  # a page that cannot be drawn ends no run
    words = ["model=vit", "budget=state_25", "race=1000", *ONE_STAGE, f"race.library={tmp_path / 'library'}"]
    write_target(tmp_path / "race", names=("muon8_lean", "foam8_lean"))
    settled = race_before_run(
        from_hydra(compose(words)), overrides=words, folder=tmp_path / "race", command="c", code=STUB
    )
    assert settled.recipe is not None and settled.recipe.name == "foam8_lean"  # the fewest bytes within the margin
    assert "frontier.html needs plotly" in capsys.readouterr().out and not list(tmp_path.rglob("frontier.html"))
    assert settled.allocator.name == "recipe" and settled.optim.lr == pytest.approx(3e-3)
    assert settled.recipe.source.startswith("race: foam8_lean: 8.8% of AdamW's state; ")  # which its plan tells
    later = resolve_raced_recipe(from_hydra(compose(["model=vit", "budget=state_25", "recipe=raced", words[-1]])))
    assert later.recipe == settled.recipe and "recipe=raced takes foam8_lean" in capsys.readouterr().out
    short = ["model=vit", "budget=state_25", "race=auto", *ONE_STAGE, words[-1]]
    write_target(tmp_path / "other", names=("muon8_lean", "foam8_lean"))
    taken = race_before_run(
        from_hydra(compose(short)), overrides=short, folder=tmp_path / "other", command="c", code=STUB
    )
    said = capsys.readouterr().out
    assert "nothing is raced before a run of 4 s" in said and "taken from an earlier race: foam8_lean" in said
    assert taken.recipe == settled.recipe


@pytest.mark.slow
def test_throughput_is_judged_at_equal_seconds(tmp_path: Path):
    write_target(tmp_path, names=("muon8_lean", "foam8_lean"))
    slow = STUB.replace('"step_ms": 10.0', '"step_ms": 20.0 if name == "muon8_lean" else 10.0')
    words = ["race.seeds=2", "race.confirm_seeds=2", "race.rates=[1]", "race.workers=2", "objective=throughput"]
    result = run_race(config(tmp_path, *words), overrides=[*WORDS, *words], folder=tmp_path, command="c", code=slow)
    assert result is not None and result["measured"]["equal_seconds"]
    with (tmp_path / "race.csv").open() as file:
        last = {(row["entrant"], row["steps"]) for row in csv.DictReader(file) if row["stage"] in ("25%", "timed tiny")}
    assert last == {("muon8_lean", "40"), ("foam8_lean", "40"), ("muon8_lean", "50"), ("foam8_lean", "100")}


def test_runs_of_a_race_keep_the_commands_other_overrides():
    words = [
        "model=llama",
        "+x=1",
        "race=600s",
        "race.seeds=2",
        "mode=race",
        "seed=3",
        "optim.lr=1",
        "logger.wandb.mode=offline",
    ]
    assert inherited_overrides([*words, "optim.weight_decay=0", "hydra.run.dir=x"]) == [
        "model=llama",
        "+x=1",
        "optim.weight_decay=0",
    ]


@pytest.mark.slow
def test_a_network_without_narrower_ones_is_raced_at_a_shorter_horizon_that_fits_the_cap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_target(tmp_path, names=("muon8_lean", "foam8_lean"), size="own", steps=100_000, num_train=0)
    result = raced(tmp_path, "model.size=tiny", cap_s=40.0)
    assert result is not None
    steps = result["measured"]["steps"]
    assert 100 <= steps < 50_000 and result["claim"].endswith(
        "not measured at 1,000 parameters and 100,000 steps, which the run has"
    )
    assert "no permutation races as a control" in capsys.readouterr().out
    again = tmp_path / "repeats"
    write_target(again, names=("muon8_lean", "foam8_lean"), size="own", steps=100_000, num_train=6400)
    result = raced(again, cap_s=40.0)
    assert result is not None and result["claim"].endswith("100,000 steps (1000.0 epochs), which the run has")
    said = capsys.readouterr().out
    assert "and the run 1000.0 times; what is best in few epochs is often what overfits first in many" in said


@pytest.mark.slow
def test_under_a_cap_two_entrants_meet_where_their_rates_are_found_and_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_target(tmp_path, names=("muon8_lean", "foam8_lean"))
    raced(tmp_path, stages=QUICK, cap_s=600.0)
    stages = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("stage ")]
    assert stages[:2] == ["25%:", "100%:"]


def test_what_a_run_took_where_nothing_was_raced_stays_when_it_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write_target(tmp_path / "race")
    monkeypatch.setattr(race_module, "run_race", lambda *_, **__: None)
    about = {"choice": "lion8", "told": "lion8: 13 %", "claim": "", "budget": "state_25"}
    family = {"model": {"name": "vit", "size": "tiny"}, "dataset": {"name": "digits"}}
    later = {**about, "family": family, "lr": 1e-3, "recipe": {"name": "lion8", "base": "lion8"}}
    given = config(tmp_path, "mode=train")
    for found in (None, later):  # the library has a race when the run is resumed
        monkeypatch.setattr(race_module.records, "find_race", lambda *_, found=found, **__: found or _none())
        assert race_before_run(given, overrides=[], folder=tmp_path / "race", command="c") == given
    other = tmp_path / "other"
    write_target(other)
    assert race_before_run(given, overrides=[], folder=other, command="c").recipe is not None
    assert "taken from an earlier race: lion8" in capsys.readouterr().out


NOTES = """
import os
with open({told!r}, "a") as file:
    file.write(f"{{time.monotonic()}} {event} {{os.environ['CUDA_VISIBLE_DEVICES']}} {{' '.join(sys.argv[1:])}}\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["race", "train"])
def test_runs_of_a_race_have_one_of_two_gpus_each(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By itself, and before a run of two devices, which has both of them after it."""
    two = [Gpu(name=str(index), total_bytes=80 << 30, uuid=f"GPU-{index}") for index in range(2)]
    monkeypatch.setattr("baoc.sweep.study.find_gpus", lambda _: two)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    write_target(tmp_path / "race", names=("muon8_lean", "foam8_lean"))
    notes = {event: NOTES.format(told=str(tmp_path / "told"), event=event) for event in ("begin", "end")}
    code = "import sys, time" + notes["begin"] + "time.sleep(0.1)\n" + STUB + notes["end"]
    monkeypatch.setattr("baoc.sweep.study.COMMAND", code)  # whose runs have GPUs
    own = [f"mode={mode}", *([] if mode == "race" else ["trainer.devices=2", "race=600"])]
    words = [*WORDS[:2], *QUICK, *own]
    given = config(tmp_path, *words[2:])
    if mode == "race":
        run_race(given, overrides=words, folder=tmp_path / "race", command="c", code=code)
    else:
        after = race_before_run(given, overrides=words, folder=tmp_path / "race", command="c", code=code)
        assert after.trainer.devices == 2 and after.recipe is not None
    held = set[str]()
    for _, event, card, *told in sorted(line.split() for line in (tmp_path / "told").read_text().splitlines()):
        assert card in ("0", "1") and not any(word.startswith("trainer.devices") for word in told)
        assert (card in held) == (event == "end")
        held ^= {card}
    assert not held
    with pytest.raises(
        BadInputError, match=r"a race trains each of its runs on one device, and trainer\.devices=2 was"
    ):
        raced(tmp_path / "refused", "trainer.devices=2")


def _none():
    raise BadInputError("there is none yet")


@pytest.mark.slow
def test_auto_is_another_budget_than_none_and_names_of_equal_limits_are_one(tmp_path: Path):
    def limits(word: str) -> object:
        return race_family(config(tmp_path, word), size="tiny")["budget"]

    assert limits("budget=auto") != limits("budget=unlimited")
    assert limits("budget=state_25") == limits("budget=state_25.0")


def test_recipe_raced_without_a_race_says_what_there_is(tmp_path: Path):
    given = config(tmp_path)
    with pytest.raises(
        BadInputError, match=r"no race in .* is of vit tiny on digits at budget state_25.*there is none yet"
    ):
        find_race(given, size="tiny", library=tmp_path / "library")


@pytest.mark.slow
def test_all_runs_failing_is_an_error_and_not_a_choice(tmp_path: Path):
    write_target(tmp_path, names=("muon8_lean",))
    with pytest.raises(TrainingFailedError, match="all 2 runs of the race's stage failed; the last: no such thing"):
        code = STUB.replace("gap =", 'fail(2, "no such thing")\ngap =')
        run_race(config(tmp_path, *ONE_STAGE), overrides=[*WORDS, *ONE_STAGE], folder=tmp_path, command="c", code=code)


@pytest.mark.slow
@pytest.mark.parametrize("cap_s", [None, 1000.0])
def test_an_entrant_all_of_whose_runs_fail_leaves_and_only_a_stage_without_others_is_an_error(
    cap_s: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Under a cap a stage goes in parts, of which the last one may be of one entrant alone."""
    write_target(tmp_path)
    names = [f"e{number}" for number in range(5)]
    racers: list[Any] = [SimpleNamespace(name=name) for name in names]
    entrants = [Entrant(name=name, state_bytes=100, uniform=True, control=False) for name in names]
    settings = RaceSettings(
        rates=(0.3, 1.0, 3.0), rungs=(1.0,), seeds=(1, 2, 3), fresh_seeds=(),
        steps=dict.fromkeys(names, 100), margin=0.01, level=0.9,
    )  # fmt: skip

    def outcome(failing: Collection[str]):
        race = race_module.RaceRun(
            config(tmp_path, "race.workers=1"), overrides=[], folder=tmp_path, command="c", code=""
        )
        race.target = read_target(tmp_path / ENTRANTS_FILE)

        def ended(number: int) -> RunEnd:
            run = race.runs[number][0]
            if run.entrant in failing:
                return RunEnd(status=FAILED, message="crashed")
            return RunEnd(status=DONE, score=1.0 + names.index(run.entrant) + 0.001 * run.seed)

        trials = SimpleNamespace(study_name="race", get_trials=lambda **_: list(range(len(race.runs))))
        monkeypatch.setattr(race_module, "run_study", lambda *_, **__: trials)
        for name, stub in {"_run_end": ended, "_has_time": lambda *_, **__: True, "_rows": list}.items():
            monkeypatch.setattr(race, name, stub)
        monkeypatch.setattr(race, "overrides_of", lambda *_: ())
        measured = RaceScale(size="tiny", num_params=1000, steps=100)
        return race.run_course(course(entrants, settings=settings), measured, racers, cap_s)

    found = outcome({"e4"})
    assert found.verdict.choice == "e0" and found.dropped["e4"] == "failed (crashed)"
    with pytest.raises(TrainingFailedError, match="all 45 runs of the race's stage failed; the last: crashed"):
        outcome(names)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["race.seeds=1"], "race.seeds=1 is not allowed: it must be 2 to 100"),
        (["race.confirm_seeds=1"], "race.confirm_seeds=1 is not allowed: it must be 2 to 100 fresh seeds, or 0"),
        (["race.rates=[]"], r"race.rates=\[\] is not allowed: it must be rising multiples"),
        (["race.rates=[3,1]"], r"race.rates=\[3.0, 1.0\] is not allowed"),
        (["race.rungs=[0.5]"], r"race.rungs=\[0.5\] is not allowed: it must be rising shares of the last rung"),
        (["race.recipes=[adamw,adamw]"], "a list in which each recipe stands once"),
        (["race.share=2"], "race.share=2 is not allowed: it must be a share of the run"),
        (["race.least_run_s=-1"], "race.least_run_s=-1 is not allowed"),
        (["race.margin=1"], "race.margin=1 is not allowed"),
        (["race.level=1"], "race.level=1 is not allowed"),
        (["race.steps=1"], "race.steps=1 is not allowed: it must be 4 or more optimizer steps, or null"),
        (["race.workers=0"], "race.workers=0 is not allowed"),
        (["race.per_gpu=0"], "race.per_gpu=0 is not allowed"),
        (["race.cap_s=0"], "race.cap_s=0 is not allowed"),
        (["race=soon"], "race=soon: allowed are off, auto .* or how long the race may take, such as race=600"),
        (["race=600", "mode=eval", "resume=auto"], "mode=eval trains nothing: leave race out"),
        (["race.cap_s=5"], "race.cap_s: of a race, and none is asked for: add race=auto, race=SECONDS or mode=race"),
        (["race=60", "race.first=off", "mode=plan"], "race.cap_s: of a race, and none is asked for"),
        (["mode=race", "resume=auto"], "resume=auto holds no race that mode=race could go on with"),
        (["mode=race", "recipe=muon8_lean"], "recipe=muon8_lean says what every block runs, and a race chooses it"),
    ],
)
def test_settings_of_a_race_are_refused_in_a_sentence(words: list[str], told: str):
    with pytest.raises(BadInputError, match=told):
        from_hydra(compose(["model=vit", *words]))


@pytest.mark.parametrize("resumes_a_folder", [False, True])
def test_a_run_that_is_resumed_finds_its_race(tmp_path: Path, resumes_a_folder: bool):
    for words in (["race=600"], ["race=600", f"resume={tmp_path if resumes_a_folder else 'auto'}"]):
        given = config(tmp_path, "mode=train", *words)
        RaceRun(given, overrides=[*WORDS, *words], folder=tmp_path, command="c", code=STUB).check_setup()


@pytest.mark.slow
def test_a_race_goes_on_under_its_own_cap_alone(tmp_path: Path):
    """Another cap would have other runs, which are known by their numbers."""

    def check(*words: str) -> None:
        given = config(tmp_path, *words)
        RaceRun(given, overrides=[*WORDS, *words], folder=tmp_path, command="c", code=STUB).check_setup()

    for words in (["race=600"], ["race=600", "race.workers=3"]):
        check(*words)
    for words, earlier in ((["race=900"], "race.cap_s=600"), (["mode=race"], "race.first=capped, race.cap_s=600")):
        with pytest.raises(BadInputError, match=rf"holds a race with {earlier}"):
            check(*words)
    setup = read_json(tmp_path / "race_setup.json")
    del setup["settings"]["race"]["cap_s"]
    (tmp_path / "race_setup.json").write_text(json.dumps(setup))
    check("race=600")


def test_what_a_race_leaves_out_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def two(race: RaceRun, cap_s: float | None) -> RacePlan:
        return RacePlan(RaceScale(size="tiny", num_params=1000, steps=400), race.target.racers[:2], (1.0,), cap_s)

    def no_time(*_: object):
        raise OutOfTimeError

    monkeypatch.setattr(RaceRun, "fit_cap", two)
    monkeypatch.setattr(RaceRun, "run_course", no_time)
    write_target(tmp_path, names=("muon8_lean", "foam8_lean", "adamw4", "permuted"), left_out=["scale8"])
    # A race that has begun asks for no file of race.recipes again
    assert raced(tmp_path, "race.recipes=[muon8_lean,scale8,/gone/mine.yaml]", cap_s=60.0) is None
    said = capsys.readouterr().out
    assert "the budget does not hold it or catalogue.specs lacks what it runs: scale8\n" in said
    assert "not raced, as there is no time for it: adamw4\n" in said


@pytest.mark.parametrize("cap_s", [None, 60.0])
def test_a_size_that_there_is_not_is_refused_before_anything_is_planned(cap_s: float | None, tmp_path: Path):
    with pytest.raises(BadInputError, match=r"race.size=huge_one: vit has tiny, mini"):
        raced(tmp_path, "race.size=huge_one", cap_s=cap_s)
    assert not (tmp_path / "plan").exists()


def test_an_allocator_that_leaves_no_choice_is_refused(tmp_path: Path):
    with pytest.raises(
        BadInputError, match="allocator=uniform_adamw says what every block runs, and a race chooses it"
    ):
        raced(tmp_path, "allocator=uniform_adamw")


@pytest.mark.parametrize(("word", "seconds"), [("600", 600.0), ("600s", 600.0), ("1.5min", 90.0), ("2h", 7200.0)])
def test_a_race_is_given_in_seconds_minutes_or_hours(word: str, seconds: float):
    found = from_hydra(compose([f"race={word}"])).race
    assert (found.first, found.cap_s) == ("capped", seconds) and len(NAMES) == 7


@pytest.mark.slow
def test_a_sibling_is_raced_at_equal_samples_a_parameter_and_the_claim_names_it(tmp_path: Path):
    write_target(tmp_path, names=("muon8_lean", "plan"), size="mini", num_params=4000, num_train=0)
    record = raced(tmp_path, "model.size=mini", "race.size=tiny")
    assert record is not None
    assert record["measured"]["size"] == "tiny" and record["measured"]["steps"] == 100  # of 400, with a quarter of them
    assert record["claim"].endswith("not measured at 4,000 parameters and 400 steps, which the run has")
    assert record["choice"] == "plan" and record["recipe"] is None  # its blocks are another network's
