"""A checkpoint that was changed anywhere, in any bit, is refused, and the one before it is found."""

import os
import random
from pathlib import Path

import pytest
import torch

from baoc.callbacks.checkpoint import AtomicCheckpointIO
from baoc.errors import CheckpointError
from baoc.tracking.checkpoints import load_checked, resolve_resume
from baoc.tracking.checksum import checksum_matches


def save(path: Path, *, step: int) -> Path:
    content = {"baoc_schema": 1, "baoc": {"name": "a"}, "global_step": step, "weights": torch.arange(512.0)}
    AtomicCheckpointIO().save_checkpoint(content, path)
    os.utime(path, (1_700_000_000 + step, 1_700_000_000 + step))
    return path


def flip(path: Path, *, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_one_with_a_checksum_is_read_by_us_and_by_torch(tmp_path: Path) -> None:
    path = save(tmp_path / "a.ckpt", step=3)
    assert checksum_matches(path) is True
    assert load_checked(path)["global_step"] == 3
    assert torch.load(path, weights_only=True, mmap=True)["global_step"] == 3


@pytest.mark.parametrize("where", ["everywhere", "end"])
def test_any_flipped_bit_is_refused(tmp_path: Path, where: str) -> None:
    """Paddings, headers and the checksum itself too, where the archive's own checksums do not look."""
    path = save(tmp_path / "a.ckpt", step=3)
    whole = path.read_bytes()
    first = 0 if where == "everywhere" else 8 * (len(whole) - 80)
    for bit in random.Random(0).sample(range(first, 8 * len(whole)), 200):
        flip(path, bit=bit)
        with pytest.raises(CheckpointError, match=r"resume=auto \(the newest intact one\)"):
            load_checked(path)
        path.write_bytes(whole)
    assert load_checked(path)["global_step"] == 3


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_or_extended_one_is_refused(tmp_path: Path, share: float) -> None:
    path = save(tmp_path / "a.ckpt", step=3)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(CheckpointError, match=r"is truncated|is damaged"):
        load_checked(path)
    path.write_bytes(whole + b"more")
    with pytest.raises(CheckpointError, match="is damaged"):
        load_checked(path)


def test_the_one_before_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "run" / "checkpoints"
    for step in (1, 2, 3):
        save(folder / f"step_{step:08d}.ckpt", step=step)
    flip(folder / "step_00000003.ckpt", bit=4321)
    whole = (folder / "step_00000002.ckpt").read_bytes()
    (folder / "step_00000002.ckpt").write_bytes(whole[:-100])
    assert resolve_resume("auto", run_root=tmp_path) == folder / "step_00000001.ckpt"
    assert caplog.text.count("passed over") == 2
    assert "does not agree with the SHA-256 at its end" in caplog.text
