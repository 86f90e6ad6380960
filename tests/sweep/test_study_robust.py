"""What happens to a study from outside: kills at random, Ctrl-C, memory that runs out, torn journals, ranks."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from datetime import datetime, timedelta
from pathlib import Path
from unittest.mock import Mock

import optuna
import pytest
from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState

from baoc.errors import BadInputError, OutputError, TrainingFailedError
from baoc.frontier.runs import quote
from baoc.sweep import status, trial_process
from baoc.sweep import study as study_module
from baoc.sweep.gpu_slots import count_oom_kills
from baoc.sweep.storage import open_study, seconds_of, to_current_paths
from baoc.sweep.study import raise_if_all_failed, run_study
from baoc.sweep.study_config import StudyConfig
from baoc.tracking.files import read_json, write_json
from tests.support.commands import start_script
from tests.support.paths import ROOT
from tests.support.studies import STUB, attempts, config
from tests.support.waiting import PATIENCE_S, has_ended, wait_until

pytestmark = pytest.mark.slow


def test_random_kills_of_workers_and_trials_lose_and_repeat_nothing(tmp_path: Path):
    """Forked workers import nothing, which takes most of the seconds of one that is started anew after each kill."""
    (script := tmp_path / "script.py").write_text(
        "import json, sys\nfrom pathlib import Path\nfrom experiments.benchmarks import study_kills\n"
        "given = study_kills.config(trials=6, kills=4, storage=None)\n"
        "told = study_kills.run(Path(sys.argv[1]), given=given, kills=4, seed=1)\n"
        "Path(sys.argv[2]).write_text(json.dumps(told))"
    )
    code, log = start_script(script, str(tmp_path / "study"), str(tmp_path / "told.json"), folder=tmp_path).done()
    assert code == 0, log
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["killed_workers"] > 0 and told["killed_trials"] > 0
    assert (told["trials"], told["complete"]) == (6, 6)
    assert told["same_points"] and told["same_values"]


def test_ctrl_c_ends_all_trials_and_the_same_command_goes_on(tmp_path: Path):
    (script := tmp_path / "script.py").write_text(
        "import signal, sys\nfrom tests.support.studies import STUB, config\n"
        "from baoc.sweep.study import run_study\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's jobs in the background ignore it
        "run_study(config(n_trials=4, retries=0, fixed=['mode=wait_once']), folder=sys.argv[1], code=STUB)"
    )
    command = start_script(script, str(tmp_path), folder=tmp_path / "log")
    wait_until(lambda: len(list(tmp_path.glob("*/process"))) == 2, what="a second trial")
    trials = [int(file.read_text()) for file in tmp_path.glob("*/process")]
    command.signal(signal.SIGINT)
    assert "KeyboardInterrupt" in command.done()[1]
    assert all(map(has_ended, trials))
    given = config(n_trials=4, retries=0, fixed=["mode=wait_once"])
    states = [trial.state for trial in open_study(given, folder=tmp_path).trials]
    assert states == [TrialState.RUNNING] * 2 + [TrialState.WAITING] * 2
    study = run_study(given, folder=tmp_path, code=STUB.replace("time.sleep(6000)", "pass"))
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 4  # no attempt was held against them
    assert attempts(tmp_path, 0) == ["new", "new"] and len(list(tmp_path.glob("0*"))) == 4


def test_a_worker_that_is_killed_takes_its_trials_along(tmp_path: Path):
    """Else they would hold their folders against the next worker, which would give them up as failed."""
    script = (
        "import sys\nfrom tests.support.studies import STUB, config\nfrom baoc.sweep.study import run_study\n"
        "run_study(config(n_trials=2, retries=0, fixed=['mode=wait_once']), folder=sys.argv[1],"
        " code=STUB)"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdout=subprocess.DEVNULL)
    wait_until(lambda: len(list(tmp_path.glob("*/process"))) == 2, what="two trials")
    trials = [int(file.read_text()) for file in tmp_path.glob("*/process")]
    process.kill()
    process.wait()
    wait_until(lambda: all(map(has_ended, trials)), what="their end")


@pytest.mark.parametrize(
    ("which", "server_gone"), [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGTERM, True)]
)
def test_an_interrupt_while_a_trial_begins_ends_that_trial_too(which, server_gone, tmp_path: Path, monkeypatch):
    begun = []
    start = study_module.TrialProcess

    def interrupted(*args, **options):
        if not server_gone:
            begun.append(start(*args, **options))
        signal.raise_signal(which)
        if server_gone:  # a signal to all processes of a job ends the server of forks as well
            raise EOFError
        return begun[-1]

    monkeypatch.setattr(study_module, "TrialProcess", interrupted)
    given = config(n_trials=2, workers=1, retries=0, fixed=["mode=wait_once"])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's jobs in the background ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            run_study(given, folder=tmp_path, code=STUB)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(begun) == (not server_gone) and all(own.process.exitcode is not None for own in begun)


def test_a_trial_that_the_kernel_kills_for_memory_is_a_violated_constraint(tmp_path: Path, monkeypatch):
    counts = iter([3, 4, 4, 4, 4, 4])
    monkeypatch.setattr(trial_process, "count_oom_kills", lambda: next(counts))
    given = config(n_trials=2, workers=1, baselines=[["x=0.1", "mode=die"]], retries=0)
    study = run_study(given, folder=tmp_path, code=STUB)
    killed, good = study.trials
    assert killed.state is TrialState.COMPLETE and killed.constraints["budget"] == 1
    assert killed.user_attrs["text"] == "the machine ran out of memory and the trial was killed"
    assert good.constraints["budget"] == 0


def test_the_kernels_counter_is_read_where_it_is(tmp_path: Path):
    (tmp_path / "events").write_text("low 0\noom 2\noom_kill 5\n")
    assert count_oom_kills([tmp_path / "none", tmp_path / "events"]) == 5
    assert count_oom_kills([tmp_path / "none"]) == 0


def test_a_torn_last_line_of_a_journal_is_set_aside_and_the_study_goes_on(tmp_path: Path, capsys):
    given = config(n_trials=2)
    run_study(given, folder=tmp_path, code=STUB)
    journal = tmp_path / "study.journal"
    with journal.open("ab") as file:
        file.write(b'{"op_code": 4, "worker')
    study = run_study(config(n_trials=3), folder=tmp_path, code=STUB)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 3
    assert "ended in a torn line: set aside in study.journal.torn" in capsys.readouterr().out
    assert (tmp_path / "study.journal.torn").read_bytes() == b'{"op_code": 4, "worker\n'


def test_a_writer_that_was_killed_in_mid_line_does_not_spoil_the_next_ones(tmp_path: Path):
    given = config(n_trials=2)
    study = open_study(given, folder=tmp_path)
    with (tmp_path / "study.journal").open("ab") as file:
        file.write(b'{"op_code": 4, "worker')  # another worker, killed while this one is at work
    study.set_user_attr("after", 1)
    assert open_study(given, folder=tmp_path).user_attrs["after"] == 1


def test_the_lock_of_a_worker_that_died_before_the_folder_was_moved_holds_nobody_up(tmp_path: Path):
    """Optuna's lock of earlier versions is a link to the journal, which is elsewhere now."""
    (tmp_path / "study.journal.lock").symlink_to(tmp_path / "gone" / "study.journal")
    (only,) = run_study(config(n_trials=1), folder=tmp_path, code=STUB).trials
    assert only.state is TrialState.COMPLETE and not (tmp_path / "study.journal.lock").is_symlink()


@pytest.mark.parametrize(
    "places", [("a", "b", "c"), ("a", "b", "a"), ("it's", "b c", "it's"), ("a", "a/sub", "a/sub/a")]
)
def test_stored_paths_below_the_folder_hold_for_any_number_of_moves(
    places: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A run that was killed between its result and `tell` is not trained again, and later ones are stored alike."""

    def given(folder: Path, count: int) -> StudyConfig:
        baselines = [["x=0.1", f"recipe={quote(str(folder / f'{n}.yaml'))}", "y=/else/0.yaml"] for n in range(count)]
        return config(n_trials=count, workers=1, baselines=baselines)

    folder = tmp_path / places[0]
    for count, place in enumerate(places):
        (aside := tmp_path / "aside").mkdir() if not count else shutil.move(folder, aside)
        folder = tmp_path / place
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(aside, folder)
        if count:
            study = run_study(given(folder, count), folder=folder, code=STUB)
            assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * count
            assert [attempts(folder, n) for n in range(count)] == [["new"]] * count
            stored = [to_current_paths(trial.user_attrs["words"], study, folder=folder) for trial in study.trials]
            assert stored == [list(words) for words in given(folder, count).baselines]
        with pytest.MonkeyPatch.context() as patch, pytest.raises(OutputError):
            patch.setattr(optuna.Study, "tell", Mock(side_effect=StorageInternalError("An exception is raised.")))
            run_study(given(folder, count + 1), folder=folder, code=STUB)
    assert "has begun without" not in capsys.readouterr().out


def test_seconds_of_a_trial_are_those_of_a_clock_that_is_never_set():
    noon = datetime(2026, 1, 1, 12)
    given = {"state": TrialState.COMPLETE, "value": 1.0}
    trial = optuna.trial.create_trial(**given)
    trial.datetime_start, trial.datetime_complete = noon, noon - timedelta(hours=1)
    assert seconds_of(trial) == 0.0
    trial.set_user_attr("seconds", 5.0)
    assert seconds_of(trial) == 5.0
    trial.datetime_complete = None
    assert seconds_of(trial) is None


def test_a_storage_that_fails_in_between_ends_the_study_in_one_sentence_and_it_goes_on(tmp_path: Path, monkeypatch):
    full = RuntimeError("database or disk is full")

    def tell(*_, **__):
        raise StorageInternalError("An exception is raised during the commit.") from full

    with (
        monkeypatch.context() as patch,
        pytest.raises(OutputError, match=r"study.db does not take .*disk is full\).*go"),
    ):
        patch.setattr(optuna.Study, "tell", tell)
        run_study(config(n_trials=2, workers=1, storage=None), folder=tmp_path, code=STUB)
    study = run_study(config(n_trials=2, workers=1, storage=None), folder=tmp_path, code=STUB)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 2
    assert attempts(tmp_path, 0) == attempts(tmp_path, 1) == ["new"]
    (tmp_path / "study.db").write_text("no database " * 99)
    with pytest.raises(BadInputError, match=r"study.db cannot be opened \(file is not a database\): make room"):
        run_study(config(n_trials=2, storage=None), folder=tmp_path, code=STUB)


def test_a_trial_that_another_worker_took_over_is_left_to_it(tmp_path: Path, monkeypatch, capsys):
    """This machine slept, and its trials are another's, one of them finished: it ends its part and goes on."""
    beat, taken = study_module.WorkerRegistry.beat, []

    def taken_over(register, *, running):
        if running == 2 and not taken:
            told = {"machine": "elsewhere", "process": 1, "began": "", "beat": 1, "running": 2, "ended": False}
            register.study.set_user_attr("worker:other", told)
            for trial in register.study.get_trials(states=(TrialState.RUNNING,)):
                taken.append(optuna.trial.Trial(register.study, trial._trial_id))
                taken[-1].set_user_attr("worker", "worker:other")
            register.study.tell(taken[0].number, [7.0, 7.0])
            return True
        return beat(register, running=running)

    monkeypatch.setattr(study_module.WorkerRegistry, "beat", taken_over)
    given = config(n_trials=3, baselines=[["x=0.1", "mode=wait_once"], ["x=0.2", "mode=wait_once"]])
    study = run_study(given, folder=tmp_path, code=STUB, wait_for_others=False)
    assert len(taken) == 2 and study.trials[0].values == [7.0, 7.0]
    assert study.trials[2].state is TrialState.COMPLETE
    assert capsys.readouterr().out.count("was taken over by another worker: this one missed heartbeats") >= 2


def test_a_server_of_forks_that_is_killed_as_a_trial_begins_is_started_again(tmp_path: Path, monkeypatch):
    start, tried = study_module.TrialProcess, []

    def broken(*args, **options):
        tried.append(1)
        if len(tried) < study_module.MAX_STARTS:
            raise EOFError
        return start(*args, **options)

    monkeypatch.setattr(study_module, "TrialProcess", broken)
    (only,) = run_study(config(n_trials=1), folder=tmp_path, code=STUB).trials
    assert only.state is TrialState.COMPLETE and len(tried) == study_module.MAX_STARTS


def test_what_a_killed_trial_forked_does_not_hold_up_its_next_attempt(tmp_path: Path):
    forks = STUB.replace(
        '    open(folder + "/last.ckpt"',
        '    forked = os.fork() or time.sleep(6000)\n    open(folder + "/forked", "w").write(str(forked))\n'
        '    open(folder + "/last.ckpt"',
    )
    (only,) = run_study(config(n_trials=1, fixed=["mode=die_once"]), folder=tmp_path, code=forks).trials
    forked = int((tmp_path / "0000" / "forked").read_text())
    assert only.state is TrialState.COMPLETE and not has_ended(forked), "it was not waited for"
    os.kill(forked, signal.SIGKILL)


def test_a_damaged_result_and_a_log_without_end_are_their_own_trials_failures(tmp_path: Path):
    code = (
        STUB
        + "if x > 0.8: open(folder + '/result.json', 'w').write('{')\nif x > 0.9: print('y' * 10**6), sys.exit(2)\n"
    )
    given = config(n_trials=3, baselines=[["x=0.85"], ["x=0.95"], ["x=0.1"]])
    damaged, loud, good = run_study(given, folder=tmp_path, code=code).trials
    assert damaged.state is TrialState.FAIL and "result.json is not JSON" in damaged.user_attrs["text"]
    assert loud.state is TrialState.FAIL and loud.user_attrs["text"] == "failed: " + "y" * 500
    assert good.state is TrialState.COMPLETE


def test_ranks_of_a_launcher_are_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(BadInputError, match="started as rank 1 of 2 processes"):
        run_study(config(), folder=tmp_path, code=STUB)
    assert not list(tmp_path.iterdir())


def test_a_result_of_an_earlier_attempt_is_not_trained_again(tmp_path: Path):
    """The study was killed between a trial's result and its record."""
    given = config(n_trials=1, workers=1, fixed=["mode=die"], retries=0)
    open_study(given, folder=tmp_path)
    (tmp_path / "0000").mkdir()
    told = '{"quality": {"value": 0.5}, "state_bytes": 7, "peak_bytes": 1, "samples_per_s": 1.0, "budget_met": false}'
    (tmp_path / "0000" / "result.json").write_text(told)
    (only,) = run_study(given, folder=tmp_path, code=STUB).trials
    assert only.values == [0.5, 7.0] and only.constraints["budget"] == 1  # it ended over its budget


def test_a_checkpoint_that_cannot_be_resumed_is_left_and_the_trial_begins_anew(tmp_path: Path):
    given = config(n_trials=1, workers=1, fixed=["mode=no_resume"], retries=0)
    open_study(given, folder=tmp_path)
    (tmp_path / "0000").mkdir()
    (tmp_path / "0000" / "last.ckpt").touch()
    (only,) = run_study(given, folder=tmp_path, code=STUB).trials
    assert only.state is TrialState.COMPLETE
    assert attempts(tmp_path, 0) == [str(tmp_path / "0000"), "new"]


def test_no_two_workers_draw_the_same_trial(tmp_path: Path):
    """sqlite has no row locks: forked workers that do nothing but draw must share the trials out."""
    given = config(n_trials=16, storage=None)
    open_study(given, folder=tmp_path)
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom tests.support.studies import config\n"
        "from baoc.sweep.storage import next_trial, open_study\nfolder = Path(sys.argv[1])\n"
        "for _ in range(4):\n    if os.fork() == 0:\n        break\nelse:\n    [os.wait() for _ in range(4)]\n"
        "    sys.exit()\n"
        "given = config(n_trials=16, storage=None)\nstudy = open_study(given, folder=folder)\n"
        "while (trial := next_trial(study, config=given, folder=folder)) is not None:\n"
        "    print(trial.number, flush=True)\nos._exit(0)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    drawn = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    ).stdout.split()
    assert sorted(map(int, drawn)) == list(range(16))


def test_a_fork_of_a_trials_fork_keeps_its_files(tmp_path: Path):
    """The first closes the trial's lock; in the second another file has that number."""
    (script := tmp_path / "script.py").write_text(
        "import os, sys\n"
        "def in_fork(body):\n    if os.fork() == 0:\n        body()\n        os._exit(0)\n"
        "    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
        "def first():\n    files = [os.open('/dev/null', 0) for _ in range(9)]\n"
        "    in_fork(lambda: [os.fstat(file) for file in files])\n"
        "in_fork(first)"
    )
    code, told = start_script(script, folder=tmp_path / "log").done()
    assert code == 0, told


def test_a_trial_that_hangs_is_ended_begun_again_and_fails_in_the_end(tmp_path: Path, monkeypatch, capsys):
    """Once: its second attempt goes on. Always, deaf to SIGTERM even: it fails, and the others finish."""
    monkeypatch.setattr(study_module, "END_PATIENCE_S", 1.0)
    hang = "open(folder + '/hangs', 'w').write(str(os.getpid())); time.sleep(6000)"
    deaf = STUB.replace('mode == "slow"', 'mode == "deaf"').replace("time.sleep(6000)", hang)
    deaf = deaf.replace("time.sleep(0.3)", f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {hang}")

    def silent_s(self: trial_process.TrialProcess) -> float:
        said = self.folder / "hangs"
        return 8.0 * (said.is_file() and said.read_text() == str(self.process.pid))

    monkeypatch.setattr(trial_process.TrialProcess, "silent_s", silent_s)
    given = config(n_trials=4, retries=1, stall_s=7, baselines=[["x=0.1", "mode=wait_once"], ["x=0.2", "mode=deaf"]])
    study = run_study(given, folder=tmp_path, code=deaf)
    once, always, *rest = study.trials
    assert once.state is TrialState.COMPLETE and attempts(tmp_path, 0) == ["new", "new"]
    assert always.state is TrialState.FAIL and always.user_attrs["text"] == (
        "failed: it was killed or failed 2 times, at last with -9: it wrote nothing for 7 s (hydra.sweeper.stall_s)"
    )
    assert [trial.state for trial in rest] == [TrialState.COMPLETE] * 2
    assert "trial 1 hangs: it wrote nothing for 7 s" in capsys.readouterr().out


def test_a_trial_that_writes_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trial = trial_process.TrialProcess(["x=0.1"], folder=tmp_path / "0000", threads=1, code=STUB)
    trial.process.join()
    now = 1000.0
    monkeypatch.setattr(trial_process.time, "monotonic", lambda: now)
    for name in (trial_process.LOG, trial_process.METRICS_FILE):
        with (tmp_path / "0000" / name).open("a") as file:
            file.write("on")
        assert trial.silent_s() == 0
        now += 5
        assert trial.silent_s() == 5


def test_two_studies_in_one_folder_are_refused_and_the_first_is_untouched(tmp_path: Path):
    run_study(config(n_trials=2), folder=tmp_path, code=STUB)
    with pytest.raises(BadInputError, match=r"is the folder of study s, and study other was asked for: .*sweep.dir"):
        run_study(config(name="other", n_trials=3), folder=tmp_path, code=STUB)
    assert len(open_study(config(n_trials=2), folder=tmp_path).trials) == 2 and not (tmp_path / "0002").exists()


@pytest.mark.parametrize(
    ("word", "recorded", "is_same"),
    [
        ("budget=300000000", "budget='300000000'", True),  # as Hydra is given them
        ("race=600", "race=600s", True),
        ("recipe=/else/r/plan.yaml", "recipe=else-r-plan", True),  # as earlier versions recorded it
        ("recipe='/new/study/r/plan.yaml'", "recipe=/new/study/r/plan.yaml", True),
        ("recipe={study}/r/plan.yaml", r"recipe='/it\'s old/r/plan.yaml'", True),  # the folder was moved
        ("recipe={study}/r/plan.yaml", "recipe=/old/other/plan.yaml", False),
        ("recipe={study}/r/plan.yaml", "recipe=/old/xr/plan.yaml", False),
        ("recipe={study}/r/plan.yaml", "dataset.path=/old/r/plan.yaml", False),
        ("recipe=/else/r/plan.yaml", "recipe=/old/r/plan.yaml", False),
        ("budget=300000000", "budget=300000001", False),
        ("seed=1", "seed=10", False),
    ],
)
@pytest.mark.parametrize("repeat", ["", "0"])
def test_a_result_counts_for_the_settings_of_its_command(
    word: str, recorded: str, is_same: bool, repeat: str, tmp_path: Path
):
    (folder := tmp_path / "0000" / repeat).mkdir(parents=True)
    (tmp_path / "study.json").write_text("{}")
    result = {"command": shlex.join(["python", "run.py", recorded]), "quality": {"value": 7.0}}
    write_json(folder / "result.json", result)
    word = word.format(study=tmp_path)
    trial = trial_process.TrialProcess([word, "hydra.x=1"], folder=folder, threads=1, code="raise SystemExit(9)")
    trial.process.join()
    outcome = trial.poll()
    assert outcome is not None and (outcome.exit_code, outcome.result) == ((0, result) if is_same else (2, None))
    assert is_same or f"holds the result of other settings (without {word})" in outcome.message
    assert read_json(folder / "result.json") == result


def test_a_result_whose_study_is_gone_is_neither_taken_nor_lost(tmp_path: Path):
    """The storage was removed, the runs were not: their numbers would be given to other settings."""
    foreign = {"command": "python run.py x=0.9 mode=slow", "quality": {"value": 7.0}, "state_bytes": 1}
    (tmp_path / "0000").mkdir()
    write_json(tmp_path / "0000" / "result.json", foreign)
    with pytest.raises(BadInputError, match="holds 1 trials, and the storage has no study s to go on with"):
        run_study(config(n_trials=2, workers=1, baselines=[["x=0.1"]]), folder=tmp_path, code=STUB)
    assert read_json(tmp_path / "0000" / "result.json") == foreign


def test_a_study_of_which_everything_failed_is_not_called_done(tmp_path: Path):
    study = run_study(config(n_trials=2, fixed=["mode=bad"]), folder=tmp_path, code=STUB)
    with pytest.raises(
        TrainingFailedError, match="all 2 ended trials of study s failed; the last failed: no such thing"
    ):
        raise_if_all_failed(study)


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(
            OutputError, match=r"the study's folder .*file.* cannot be written \(.*\): give another one"
        ):
            run_study(config(n_trials=1), folder=folder, code=STUB)


def test_a_killed_server_of_forks_is_not_the_fault_of_its_trials(tmp_path: Path, capsys):
    """It is killed with the trials that it forked; with retries=0 they would fail for good."""
    given = config(n_trials=2, workers=2, retries=0, fixed=["mode=wait_once"])

    def kill_server() -> None:
        begun = lambda: [path.read_text() for path in tmp_path.glob("*/process")]  # noqa: E731
        wait_until(lambda: len(list(filter(None, begun()))) == 2, what="the second trial")
        number = (tmp_path / "0000" / "process").read_text()
        os.kill(int(Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[1]), signal.SIGKILL)

    killer = threading.Thread(target=kill_server)
    killer.start()
    study = run_study(given, folder=tmp_path, code=STUB)
    killer.join()
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 2
    assert all("attempts" not in trial.user_attrs for trial in study.trials)
    assert "begun again: the server that its process was forked from was killed" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["{}", "[]", "3", '{"name": "s", "storage": 3, "objectives": {}, "n_trials": 1}'])
def test_a_study_file_that_describes_none_is_told(tmp_path: Path, content: str, capsys):
    (tmp_path / "study.json").write_text(content)
    assert status.main([str(tmp_path)]) == 2
    assert "study.json does not describe a study by name, storage, objectives, n_trials" in capsys.readouterr().err


def test_a_storage_without_the_study_is_told_and_none_is_made(tmp_path: Path, capsys):
    run_study(config(n_trials=1), folder=tmp_path, code=STUB)
    gone = tmp_path / "gone.db"
    assert status.main([str(tmp_path), "--storage", f"sqlite:///{gone}"]) == 2
    assert f"there is no file {gone}" in capsys.readouterr().err and not gone.exists()
    for name, content in (("empty.db", b""), ("torn.db", b"no database" * 100)):
        (tmp_path / name).write_bytes(content)
        assert status.main([str(tmp_path), "--storage", f"sqlite:///{tmp_path / name}"]) == 2
        assert "holds no study 's'" in capsys.readouterr().err
