"""A study of stubs that validate at three steps: who is ended at which rung, and what is kept of it."""

import json
from pathlib import Path

import pytest
from optuna.trial import TrialState

from baoc.sweep.early_stopping import EarlyStopping
from baoc.sweep.status import load_study, main, status_of
from baoc.sweep.study import run_study
from baoc.sweep.study_config import StudyConfig, read_study

pytestmark = pytest.mark.slow

# Quality falls from 2q to q. A run waits at each step until the study has looked at it, and ends at SIGTERM as runs do.
STUB = """
import json, os, signal, sys, time
words = dict(word.split("=", 1) for word in sys.argv[1:])
folder, quality, size = words["hydra.run.dir"], float(words["q"]), int(words["size"])
def end(*_):
    json.dump({"schema": 1, "kind": "K", "message": "interrupted", "exit_code": 130}, open(folder + "/error.json", "w"))
    sys.exit(130)
signal.signal(signal.SIGTERM, end)
json.dump({"state_bytes": size}, open(folder + "/allocation.json", "w"))
for step in (10, 20, 30):
    value = quality * (2 - step / 30)
    with open(folder + "/metrics.jsonl", "a") as file:
        line = {"schema": 1, "step": step - 1, "epoch": 0, "time_s": 0, "val/loss": value}
        file.write(json.dumps(line) + "\\n")
    while words.get("wait") and not os.path.exists(f"{folder}/looked_at_{step}"):
        time.sleep(0.01)
result = {"quality": {"value": quality}, "state_bytes": size, "peak_bytes": 1, "samples_per_s": 1.0}
json.dump(result, open(folder + "/result.json", "w"))
"""


def config(**changes: object) -> StudyConfig:
    values = {
        "name": "s",
        "objectives": {"quality": "minimize", "state_bytes": "minimize"},
        "space": {"q": {"choices": [4.0]}, "size": {"choices": [9]}},
        "fixed": ["wait=1"],
        "sampler": "grid",
        "early_stop": {"rungs": [10, 20], "margin": 0.1, "least": 2},
        "n_trials": 3,
    }
    return read_study(values | changes)


def test_a_beaten_trial_is_ended_at_its_first_rung_and_no_baseline_nor_one_of_fewer_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    plain = EarlyStopping.stop_reason

    def stop_reason(self: EarlyStopping, folder: Path, *, repeat: int) -> str:
        file = folder / "metrics.jsonl"
        seen = file.read_text().count("\n") if file.is_file() else 0
        reason = plain(self, folder, repeat=repeat)
        for step in range(10, 10 * seen + 1, 10) if not reason else ():
            (folder / f"looked_at_{step}").touch()
        return reason

    monkeypatch.setattr(EarlyStopping, "stop_reason", stop_reason)
    baselines = [["q=1", "size=5"], ["q=5", "size=9"]]
    space = {"q": {"choices": [4.0]}, "size": {"choices": [4, 9]}}
    study = run_study(config(baselines=baselines, space=space, n_trials=4), folder=tmp_path, code=STUB)
    smaller, beaten = sorted(study.trials[2:], key=lambda trial: trial.params["size"])
    states = [trial.state for trial in (*study.trials[:2], smaller, beaten)]
    assert states == [TrialState.COMPLETE] * 3 + [TrialState.PRUNED]
    assert beaten.user_attrs["text"] == "ended early: trial 0 is better in everything at step 10"
    assert beaten.user_attrs["rung:0:10"] == {"quality": 4.0 * (2 - 1 / 3), "state_bytes": 9}
    folder = tmp_path / f"{beaten.number:04d}"
    assert json.loads((folder / "error.json").read_text())["message"] == beaten.user_attrs["text"]
    assert "rung:0:20" in study.trials[0].user_attrs and "rung:0:20" not in beaten.user_attrs
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 9
    assert main([str(tmp_path)]) == 0
    assert (
        "3/4 done (0 over budget or diverged), 1 ended early, 0 failed, 0 running, 0 waiting" in capsys.readouterr().out
    )


def test_the_status_of_a_study_is_read_from_its_folder_alone(tmp_path: Path, capsys):
    run_study(config(fixed=[], n_trials=1, storage="journal"), folder=tmp_path / "study", code=STUB)
    moved = (tmp_path / "study").rename(tmp_path / "moved")  # study.json names the storage by its path
    study, objectives, total = load_study(moved)
    status = status_of(study.trials, total=total, objectives=objectives)
    assert (status.done, status.waiting, status.on_front) == (1, 0, 1)
    assert status.best == ("quality 4 (trial 0)", "state_bytes 9 B (trial 0)")
    assert main([str(tmp_path / "elsewhere")]) == 2
    assert "there is no study.json" in capsys.readouterr().err
    (moved / "study.journal").unlink()
    assert main([str(moved)]) == 2
    assert f"study/study.journal is gone, and {moved / 'study.journal'} is not there" in capsys.readouterr().err


def test_a_storage_with_settings_in_its_url_is_found(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'all.db'}?timeout=30"
    run_study(config(fixed=[], n_trials=1, storage=url), folder=tmp_path / "study", code=STUB)
    assert len(load_study(tmp_path / "study")[0].trials) == 1
