"""Studies whose trials are a few lines of Python instead of a training run."""

from pathlib import Path

from baoc.sweep.study_config import StudyConfig, read_study

# A trial in milliseconds: x decides how it ends, and each attempt leaves a line.
STUB = """
import json, os, shlex, signal, sys, time
from baoc.frontier.runs import unquote
words = dict(word.split("=", 1) for word in sys.argv[1:])
folder = unquote(words["hydra.run.dir"])
x = float(words["x"])
with open(os.path.join(folder, "attempts"), "a") as file:
    file.write(words.get("resume", "new") + "\\n")
def fail(code, message, kind="K"):
    json.dump({"schema": 1, "kind": kind, "message": message, "exit_code": code}, open(folder + "/error.json", "w"))
    sys.exit(code)
open(folder + "/process", "w").write(str(os.getpid()))
attempts = len(open(folder + "/attempts").readlines())
mode = words.get("mode", "ok")
if mode == "slow":
    time.sleep(0.3)
if mode == "wait_once" and attempts == 1:
    time.sleep(6000)  # until it is ended
if mode == "no_resume" and "resume" in words:
    fail(2, "nothing is left to train")
if mode == "die_once" and attempts == 1:
    open(folder + "/last.ckpt", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "bad":
    fail(2, "no such thing")
if mode == "infeasible" and x < 0.5:
    fail(3, "least feasible is 0.5")
if mode == "diverge":
    fail(5, "nan", kind="DivergedError")
quality = None if mode == "nan" else (x - float(words.get("best", "0.3"))) ** 2
result = {"quality": {"value": quality}, "state_bytes": int(100 * x), "peak_bytes": 1, "samples_per_s": 1.0}
result["command"] = shlex.join(sys.argv)
json.dump(result, open(folder + "/result.json", "w"))
"""


def config(**changes: object) -> StudyConfig:
    """Kept in a journal, which takes a third of the processor seconds of sqlite; `storage=None` is that."""
    values = {
        "name": "s",
        "objectives": {"quality": "minimize", "state_bytes": "minimize"},
        "space": {"x": {"low": 0.0, "high": 1.0}},
        "sampler": "random",
        "n_trials": 6,
        "workers": 2,
        "storage": "journal",
    }
    return read_study(values | changes)


def attempts(folder: Path, number: int) -> list[str]:
    return (folder / f"{number:04d}" / "attempts").read_text().split()
