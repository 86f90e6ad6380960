"""`trainer.devices=N`: N processes of one run, one command and one exit code, whichever of them something befalls.

What needs no launcher, exit code or killed process is in tests/training/test_ddp_runs.py.
"""

import json
import re
import signal
from pathlib import Path
from socket import socket

import pytest
from torch.distributed import run as torchrun

from baoc.cli import ranks as ranks_module
from baoc.cli.ranks import first_host
from baoc.parallel import current_rank
from tests.support.commands import Command, start, start_script
from tests.support.paths import ROOT
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

WORDS = ("model.size=tiny", "device=cpu", "trainer.max_steps=12", "trainer.log_every_n_steps=1", "batch_size=64")
QUICK = ("trainer.limit_val_batches=1", "checkpoint.export=false", "checkpoint.every_n_steps=4")
# What befalls rank 1 in its 7th forward pass: a module that Python imports as it starts.
FAULT = """
import os
if os.environ.get("RANK") == "1" and os.environ.get("FAULT"):
    import signal
    from baoc import parallel
    parallel.PEER_TIMEOUT_S = 2.0
    from torch import OutOfMemoryError
    from baoc.tasks import vision
    kind = os.environ["FAULT"]
    task = next(v for v in vars(vision).values() if isinstance(v, type) and "training_step" in vars(v))
    plain, seen = task.training_step, []
    def step(self, batch, index):
        seen.append(self.trainer.global_step)
        loss = plain(self, batch, index)
        if self.trainer.global_step == 6 and self.trainer.training:
            if kind == "oom": raise OutOfMemoryError("CUDA out of memory, on rank 1")
            if kind == "leave": raise SystemExit(0)
            if kind == "exit":  # whose connections stay, so that the other rank waits as on a GPU
                if os.fork():
                    os._exit(0)
                __import__("time").sleep(60)
                os._exit(0)
            if kind.startswith("SIG"): os.kill(os.getpid(), getattr(signal, kind))
        return loss
    task.training_step = step
"""


# Rank 0 need not wait for 20 s until it ends a run that hangs, as another rank has left it.
COMMAND = """
import sys
from baoc.cli import main, ranks
ranks.SHUTDOWN_S = {patience_s}
sys.exit(main.main(sys.argv[1:]))
"""


def started(folder: Path, *words: str, fault: str = "") -> Command:
    """A run of two ranks, which are forked from a server that has imported what runs need."""
    (day := folder.parent).mkdir(parents=True, exist_ok=True)
    (day / "sitecustomize.py").write_text(FAULT)
    (script := day / "command.py").write_text(
        COMMAND.format(patience_s=2.0 if fault == "exit" else ranks_module.SHUTDOWN_S)
    )
    given = (*WORDS, *QUICK, *words, "trainer.devices=2", "budget=state_25", f"hydra.run.dir={folder}")
    return start_script(script, *given, folder=day / "log", cwd=day, PYTHONPATH=str(day), FAULT=fault)


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


@pytest.mark.parametrize(
    ("fault", "exit_code", "words"),
    [
        ("oom", 4, "rank 1: .*has no memory left"),
        ("leave", 5, r"rank 1: it was left by sys.exit\(0\) before its end"),
        ("exit", 5, "rank 1 ended with exit code 0 too early"),
    ],
)
def test_an_error_of_one_rank_ends_the_run_with_its_exit_code(
    fault: str, exit_code: int, words: str, tmp_path: Path
) -> None:
    code, told = started(tmp_path / "day" / "run", "trainer.strategy=fsdp", fault=fault).done()
    assert code == exit_code and re.search(words, " ".join(told.split())), told


def test_a_killed_rank_ends_the_run_and_a_signal_to_the_command_the_next_attempt(tmp_path: Path) -> None:
    folder = tmp_path / "day" / "run"
    code, told = started(folder, "trainer.strategy=fsdp", fault="SIGKILL").done()
    assert code == 5 and "rank 1 was ended by SIGKILL; resume=auto goes on" in " ".join(told.split()), told
    assert max(losses(folder)) < 11 and not (folder / "result.json").exists()
    metrics = folder / "metrics.jsonl"
    before = metrics.stat().st_size  # lines after the checkpoint go as the second attempt begins
    command = started(folder, "trainer.strategy=fsdp", "trainer.max_steps=4000", "resume=auto")
    wait_until(lambda: metrics.stat().st_size > before, what="a new step of the second attempt")
    command.signal(signal.SIGTERM)
    code, told = command.done()
    assert code == 130 and "SIGTERM ended the run after step" in told, told
    assert (folder / "checkpoints" / "last.ckpt").is_file()
    steps = list(losses(folder))
    assert steps == list(range(len(steps))), "none is missing, and none there twice"


def test_torchrun_trains_one_run(tmp_path: Path) -> None:
    (day := tmp_path / "day").mkdir()
    launcher = ("--nproc-per-node", "2", "--standalone", str(ROOT / "run.py"))
    words = (*WORDS, *QUICK, "budget=state_25", "trainer.max_steps=4", "trainer.strategy=fsdp")
    words += (f"hydra.run.dir={day / 'run'}",)
    code, told = start_script(Path(torchrun.__file__), *launcher, *words, folder=tmp_path / "log", cwd=day).done()
    assert code == 0, told
    assert [entry.name for entry in day.iterdir() if entry.is_dir()] == ["run"]
    assert json.loads((day / "run" / "result.json").read_text())["num_ranks"] == 2


def launched(folder: Path, *words: str) -> list[Command]:
    """Two ranks, as a launcher starts them."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    places = [{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"} for rank in ("0", "1")]
    words = (*WORDS, *words, f"hydra.run.dir={folder / 'run'}")
    return [start(*words, folder=folder / place["RANK"], cwd=None, **place, **meeting) for place in places]


def test_ranks_of_a_launcher_refuse_a_word_once(tmp_path: Path) -> None:
    ends = [command.done() for command in launched(tmp_path, "trainer.max_stps=2")]
    assert [code for code, _ in ends] == [2, 2]
    assert "".join(told for _, told in ends).count("unknown key trainer.max_stps") == 1
    assert not (tmp_path / "run").exists()


def test_a_rank_of_a_launcher_is_told_that_another_was_killed(tmp_path: Path) -> None:
    first, second = launched(tmp_path, *QUICK, "trainer.max_steps=4000")
    wait_until(lambda: (tmp_path / "run" / "metrics.jsonl").is_file(), what="a step")
    second.signal(signal.SIGKILL)
    code, told = first.done()
    assert code == 5 and "the connection to another rank was lost; resume=auto goes on" in " ".join(told.split()), told


def test_several_tasks_of_a_submitit_job_are_one_run(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    words = [*WORDS, *QUICK, "trainer.max_steps=4", "budget=state_25", "hydra/launcher=submitit_local"]
    words += ["hydra.launcher.tasks_per_node=2", f"hydra.sweep.dir={sweep}", "hydra.sweep.subdir=job"]
    code, told = start("-m", *words, folder=tmp_path).done()
    assert code == 0, told
    result = json.loads((sweep / "job" / "result.json").read_text())
    assert (result["num_ranks"], len(result["peak_by_rank"]), result["num_steps"]) == (2, 2, 4)
    assert list(losses(sweep / "job")) == list(range(4))


def test_a_trial_of_a_study_has_ranks_of_its_own(tmp_path: Path) -> None:
    """The second of its two ranks is a fresh interpreter, where those of other tests are forked."""
    words = ["sweeps=frontier_vision", "hydra.sweeper.n_trials=1", "hydra.sweeper.gpus_per_trial=2"]
    words += [
        "hydra.sweeper.early_stop.rungs=[]",
        "hydra.sweeper.baselines=[]",
        f"hydra.sweep.dir={tmp_path / 'study'}",
    ]
    code, told = start("-m", *words, *WORDS, *QUICK, "trainer.max_steps=4", folder=tmp_path).done()
    assert code == 0, told
    result = json.loads((tmp_path / "study" / "0000" / "result.json").read_text())
    assert result["num_ranks"] == 2 and "trainer.devices=2" in result["command"]


SLURM = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_JOB_ID": "41"}


def test_srun_tells_a_task_of_two_machines_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {**SLURM, "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NODELIST": "gpu[07-08]"}
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_NAME"):
        monkeypatch.delenv(key, raising=False)
    for key, value in given.items():
        monkeypatch.setenv(key, value)
    told = current_rank()
    assert told is not None and str(told) == "rank 9 of 16 processes (srun: SLURM_NTASKS)"
    variables = ranks_module.rendezvous_environment(told)
    assert variables == {
        "RANK": "9",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "15041",
    }


def test_the_first_machine_of_a_list() -> None:
    assert [first_host(nodes) for nodes in ("gpu[03-05,9],cpu1", "gpu1,gpu2", "gpu7")] == ["gpu03", "gpu1", "gpu7"]
