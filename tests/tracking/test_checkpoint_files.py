"""Every way in which a file is no checkpoint has its own text; `resume=` finds the newest intact one."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_parts

from baoc.callbacks.generators import capture_rng
from baoc.config.schema import RunConfig
from baoc.errors import CheckpointError
from baoc.tracking.checkpoints import check_shard_metadata, load_checked, newest_first, resolve_resume
from baoc.training import resume
from baoc.training.lightning import BaocStrategy
from baoc.training.resume import find_checkpoint


def save(path: Path, *, age_s: float = 0.0, **content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"baoc_schema": 1, "baoc": {}, "weights": torch.arange(4096.0), **content}, path)
    stamp = 1_700_000_000 - age_s
    os.utime(path, (stamp, stamp))
    return path


STEPS = "epoch_loop.automatic_optimization.optim_progress"  # where Lightning keeps how many were done


def save_run(path: Path, **content: Any) -> Path:
    """What a run can go on from, as far as it is looked at before."""
    parts = {
        "global_step": 1,
        "epoch": 0,
        "state_dict": {"w": torch.ones(2)},
        "optimizer_states": [{"state": {}}],
        "lr_schedulers": [],
        "loops": {"fit_loop": {STEPS: {"optimizer": {"step": {"total": {"completed": 1}}}}}},
        "callbacks": {"RngState": capture_rng()},
        "hyper_parameters": {},
    }
    return save(path, **parts, **content)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def test_an_intact_one_loads(tmp_path: Path) -> None:
    content = load_checked(save(tmp_path / "a.ckpt", extra=[1, "x", None]))
    assert torch.equal(content["weights"], torch.arange(4096.0))
    assert content["extra"] == [1, "x", None]


def test_missing(tmp_path: Path) -> None:
    save(tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*b\.ckpt: that folder holds last\.ckpt; give"):
        load_checked(tmp_path / "b.ckpt")
    with pytest.raises(CheckpointError, match="that folder holds no checkpoint"):
        load_checked(tmp_path / "nowhere" / "b.ckpt")
    with pytest.raises(CheckpointError, match="is a folder, not a checkpoint file"):
        load_checked(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 300, 16000])
def test_truncated(tmp_path: Path, kept: int) -> None:
    path = save(tmp_path / "a.ckpt")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"is truncated: its .* lack the end of the archive.*resume=auto"):
        load_checked(path)


def test_flipped_byte_that_torch_itself_does_not_notice(tmp_path: Path) -> None:
    path = save(tmp_path / "a.ckpt")
    flip_a_byte(path)
    torch.load(path)
    with pytest.raises(CheckpointError, match=r"is damaged: .*data/0 in it fails its checksum"):
        load_checked(path)


def test_foreign_files(tmp_path: Path) -> None:
    (tmp_path / "text.ckpt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"it is not a torch archive \(it begins with b'hell'\)"):
        load_checked(tmp_path / "text.ckpt")
    torch.save({"model": 1, "step": 2}, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match="was not written by baoc: it holds no 'baoc_schema' but model, step"):
        load_checked(tmp_path / "other.ckpt")
    assert load_checked(tmp_path / "other.ckpt", baoc_only=False) == {"model": 1, "step": 2}
    torch.save(torch.zeros(3), tmp_path / "tensor.ckpt")
    with pytest.raises(CheckpointError, match="but Tensor"):
        load_checked(tmp_path / "tensor.ckpt", baoc_only=False)


def test_python_objects_are_not_loaded(tmp_path: Path) -> None:
    path = save(tmp_path / "a.ckpt", hyper_parameters={"net": Path("x")})
    with pytest.raises(CheckpointError, match="holds Python objects beside tensors and plain values"):
        load_checked(path)
    assert load_checked(path, weights_only=False)["hyper_parameters"]["net"] == Path("x")


def test_a_newer_schema(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has schema 2 and this version of baoc reads up to 1: upgrade baoc"):
        load_checked(save(tmp_path / "a.ckpt", baoc_schema=2))


def test_auto_takes_the_newest_intact_one_of_the_same_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = save(tmp_path / "run0" / "checkpoints" / "last.ckpt", baoc={"name": "a"}, age_s=30)
    damaged = save(tmp_path / "run1" / "checkpoints" / "last.ckpt", baoc={"name": "a"}, age_s=20)
    flip_a_byte(damaged)
    os.utime(damaged, (1_700_000_000, 1_700_000_000))
    other = save(tmp_path / "run2" / "checkpoints" / "last.ckpt", baoc={"name": "b"}, age_s=10)
    assert resolve_resume("auto", run_root=tmp_path, match={"name": "a"}) == old
    assert "passed over" in caplog.text and "fails its checksum" in caplog.text
    assert resolve_resume("auto", run_root=tmp_path) == other
    assert resolve_resume("auto", run_root=tmp_path, match={"name": "c"}) is None
    assert resolve_resume("auto", run_root=tmp_path / "nowhere") is None


def test_a_run_that_is_queued_again_goes_on_in_its_own_folder(tmp_path: Path) -> None:
    about = {"name": "a", "seed": 0}
    mine = save_run(tmp_path / "day" / "job0" / "checkpoints" / "last.ckpt", baoc=about, age_s=30)
    newer = save_run(tmp_path / "day" / "job1" / "checkpoints" / "last.ckpt", baoc=about)  # of another point of a sweep
    config = RunConfig(name="a", seed=0, resume="auto")
    assert find_checkpoint(config, run_dir=tmp_path / "day" / "job0") == mine
    assert find_checkpoint(config, run_dir=tmp_path / "day" / "job2") == newer


@pytest.mark.parametrize(("run_dir", "searched"), [("/a/day/run", "/a"), ("/day/run", "/day"), ("/run", "/run")])
def test_auto_never_searches_the_root_of_the_file_system(
    run_dir: str, searched: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots: list[Path] = []
    monkeypatch.setattr(resume, "resolve_resume", lambda *_, run_root, **__: roots.append(run_root))
    assert find_checkpoint(RunConfig(name="a", resume="auto"), run_dir=Path(run_dir)) is None
    assert roots == [Path(run_dir), Path(searched)]


def test_a_run_that_was_killed_before_its_first_checkpoint_takes_no_other_run_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = {"name": "a", "seed": 0}
    other = save_run(tmp_path / "day" / "job1" / "checkpoints" / "last.ckpt", baoc=about)
    mine, config = tmp_path / "day" / "job0", RunConfig(name="a", seed=0, resume="auto")
    assert find_checkpoint(config, run_dir=mine) == other, (
        "nothing was trained here: go on with the newest of this name"
    )
    mine.mkdir(parents=True)
    (mine / "metrics.jsonl").write_text('{"schema": 1, "step": 0}\n')
    assert find_checkpoint(config, run_dir=mine) is None
    assert "found nothing to resume: starting anew" in capsys.readouterr().out
    flip_a_byte(save_run(mine / "checkpoints" / "last.ckpt", baoc=about))
    assert find_checkpoint(config, run_dir=mine) is None, "nor where all of its own are broken"
    whole = save_run(mine / "checkpoints" / "step_00000002.ckpt", baoc=about)
    assert find_checkpoint(config, run_dir=mine) == whole


def test_of_files_written_together_the_last_one_is_taken(tmp_path: Path) -> None:
    save(tmp_path / "best_00000004.ckpt")
    last = save(tmp_path / "last.ckpt")
    save(tmp_path / "step_00000002.ckpt")
    assert resolve_resume("auto", run_root=tmp_path) == last


def test_when_files_were_written_is_read_without_running_what_they_name(tmp_path: Path) -> None:
    """Any file beside a run may name code; that of another program counts by its own time."""
    last = save(tmp_path / "last.ckpt", baoc={"written_s": 30.0}, age_s=9, of=[torch.zeros(3)])
    old = save(tmp_path / "step_00000002.ckpt", baoc={"written_s": 10.0}, age_s=0)
    foreign = save(tmp_path / "foreign.ckpt", baoc={"written_s": 99.0}, age_s=0, of=[_Marks(tmp_path / "ran")])
    assert newest_first([old, last, foreign]) == [foreign, last, old] and not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_of_parts_is_read_without_running_what_it_names(tmp_path: Path) -> None:
    state = {"state_dict": {"w": torch.ones(3, dtype=torch.bfloat16)}, "step": [1, {"a": (2,)}]}
    save_parts(state, checkpoint_id=tmp_path / "parts", no_dist=True)
    check_shard_metadata(tmp_path / "parts")
    for content in (_Marks(tmp_path / "ran"), {"state_dict_metadata": os.system}, eval):
        (tmp_path / "parts" / ".metadata").write_bytes(pickle.dumps(content))
        with pytest.raises(CheckpointError, match=r"parts/\.metadata holds Python objects .* may run code \(it names "):
            check_shard_metadata(tmp_path / "parts")
        with pytest.raises(CheckpointError, match="may run code"):
            BaocStrategy("state_25").load_checkpoint(tmp_path / "parts")
    (tmp_path / "parts" / ".metadata").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="cannot be read"):
        check_shard_metadata(tmp_path / "parts")
    assert not (tmp_path / "ran").exists()


class _Marks:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_a_copied_folder_is_ordered_by_what_its_files_say(tmp_path: Path) -> None:
    """`cp -r` gives files new times, in any order."""
    last = save(tmp_path / "last.ckpt", baoc={"written_s": 30.0}, age_s=9)
    save(tmp_path / "step_00000002.ckpt", baoc={"written_s": 10.0}, age_s=0)
    save(tmp_path / "best_00000004.ckpt", baoc={"written_s": 20.0}, age_s=3)
    assert resolve_resume("auto", run_root=tmp_path) == last
    flip_a_byte(last)
    assert resolve_resume("auto", run_root=tmp_path) == tmp_path / "best_00000004.ckpt"


def test_a_path_may_be_a_file_or_a_run_folder(tmp_path: Path) -> None:
    path = save(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert resolve_resume(path, run_root="unused") == path
    assert resolve_resume(tmp_path / "run", run_root="unused") == path
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no intact checkpoint"):
        resolve_resume(tmp_path / "empty", run_root=tmp_path)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        resolve_resume(tmp_path / "no.ckpt", run_root=tmp_path)
