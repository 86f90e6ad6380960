"""`trainer.devices=N`: N processes of one run, one command and one exit code, whichever of them something befalls."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from baoc.cli.ranks import first_host
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

WORDS = ("model.size=tiny", "device=cpu", "trainer.max_steps=12", "trainer.log_every_n_steps=1", "batch_size=64")
QUICK = ("trainer.limit_val_batches=1", "checkpoint.export=false", "checkpoint.every_n_steps=4")
# What befalls rank 1 in its 7th forward pass: a module that Python imports as it starts.
FAULT = """
import os
if os.environ.get("RANK") == "1" and os.environ.get("FAULT"):
    import signal, time
    from torch import OutOfMemoryError, nan
    from baoc.tasks import vision
    kind = os.environ["FAULT"]
    task = next(v for v in vars(vision).values() if isinstance(v, type) and "training_step" in vars(v))
    plain, seen = task.training_step, []
    def step(self, batch, index):
        seen.append(self.trainer.global_step)
        loss = plain(self, batch, index)
        if self.trainer.global_step == 6 and self.trainer.training:
            if kind == "nan": return loss * nan
            if kind == "oom": raise OutOfMemoryError("CUDA out of memory, on rank 1")
            if kind == "slow": time.sleep(2)
            if kind.startswith("SIG"): os.kill(os.getpid(), getattr(signal, kind))
        return loss
    task.training_step = step
"""


def started(folder: Path, *words: str, fault: str = "", launcher: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
    folder.parent.mkdir(parents=True, exist_ok=True)
    (folder.parent / "sitecustomize.py").write_text(FAULT)
    path = os.pathsep.join([str(ROOT), str(folder.parent)])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "FAULT": fault}
    command = [sys.executable, *launcher, str(ROOT / "run.py"), *WORDS, *QUICK, *words, f"hydra.run.dir={folder}"]
    return subprocess.Popen(
        command, env=env, cwd=folder.parent, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def done(folder: Path, *words: str, fault: str = "", launcher: tuple[str, ...] = ()) -> tuple[int, str]:
    process = started(folder, *words, fault=fault, launcher=launcher)
    out, err = process.communicate(timeout=120)
    return process.returncode, out + err


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def close(one: Path, other: Path, *, within: float = 1e-5) -> bool:
    first, second = losses(one), losses(other)
    return first.keys() == second.keys() and all(abs(first[step] - second[step]) <= within for step in first)


def test_one_curve_at_any_number_of_ranks_and_across_a_resume(tmp_path: Path) -> None:
    runs = {name: tmp_path / name / "run" for name in ("one", "two", "one_two", "two_one")}
    devices = {1: "trainer.devices=1", 2: "trainer.devices=2"}
    for name, (before, after) in {"one": (1, 1), "two": (2, 2), "one_two": (1, 2), "two_one": (2, 1)}.items():
        cut = () if before == after else ("trainer.max_steps=8",)
        words = ("optim.schedule=constant", "optim.warmup_fraction=0", "risk=prior")  # Muon's products are in bf16
        code, told = done(runs[name], devices[before], *words, *cut)
        assert code == 0, told
        if cut:
            code, told = done(runs[name], devices[after], *words, f"resume={runs[name]}")
            assert code == 0, told
    assert all(close(runs["one"], runs[name]) for name in ("two", "one_two", "two_one"))
    results = {name: json.loads((runs[name] / "result.json").read_text()) for name in ("one", "two")}
    assert results["one"]["state_bytes"] == results["two"]["state_bytes"]
    assert results["two"]["peak_bytes"] <= results["two"]["peak_bytes_predicted"]


FAULTS = {
    "nan": (0, "the loss of step 7 is nan: the step changes nothing"),
    "oom": (4, "rank 1: .*has no memory left"),
    "SIGTERM": (130, "SIGTERM ended the run after step 7"),
    "SIGKILL": (5, "rank 1 was ended by SIGKILL; resume=auto goes on"),
    "slow": (0, "run folder"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_befalls_one_rank_ends_or_spares_all(fault: str, tmp_path: Path) -> None:
    folder = tmp_path / "day" / "run"
    code, told = done(folder, "trainer.devices=2", "budget=state_25", "reallocation=interval", fault=fault)
    expected, text = FAULTS[fault]
    assert code == expected, told
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(" ".join(told.split()))
    if expected:
        code, told = done(folder, "trainer.devices=2", "budget=state_25", "resume=auto")
        assert code == 0, told
    assert max(losses(folder)) == 11 and (folder / "result.json").is_file()


def test_torchrun_trains_one_run(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    code, told = done(tmp_path / "day" / "run", "budget=state_25", launcher=launcher)
    assert code == 0, told
    assert [entry.name for entry in (tmp_path / "day").iterdir() if entry.is_dir()] == ["run"]
    code, told = done(tmp_path / "day" / "other", "trainer.max_stps=2", launcher=launcher)
    assert code != 0 and told.count("unknown key trainer.max_stps") == 1
    assert not (tmp_path / "day" / "other").exists()


def test_a_signal_to_the_command_ends_all_ranks_after_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "day" / "run"
    process = started(folder, "trainer.devices=2", "budget=state_25", "trainer.max_steps=4000")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            break
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "SIGTERM ended the run after step" in err, out + err
    assert (folder / "checkpoints" / "last.ckpt").is_file()


def test_the_first_machine_of_a_list() -> None:
    assert [first_host(nodes) for nodes in ("gpu[03-05,9],cpu1", "gpu1,gpu2", "gpu7")] == ["gpu03", "gpu1", "gpu7"]
