"""Which gpu a trial gets: its own, or one that budgets fit together; agreed among processes, freed if killed."""

import subprocess
import sys
from pathlib import Path

import pytest

from baoc.errors import BadInputError
from baoc.sweep.gpu_slots import Gpu, GpuLease, GpuSlots, filter_visible, parse_gpus
from baoc.sweep.study import run_study
from tests.support.paths import ROOT
from tests.support.studies import STUB, config

GIB = 2**30
TWO = (Gpu(name="0", total_bytes=80 * GIB, uuid="GPU-aa"), Gpu(name="1", total_bytes=80 * GIB, uuid="GPU-bb"))


def test_nvidia_smi_is_read_and_visible_devices_are_kept_to():
    gpus = parse_gpus("0, 81559, GPU-aa\n1, 81559, GPU-bb\nNo devices\n")
    assert [(gpu.name, gpu.total_bytes, gpu.uuid) for gpu in gpus] == [
        ("0", 81559 * 2**20, "GPU-aa"),
        ("1", 81559 * 2**20, "GPU-bb"),
    ]
    assert [gpu.name for gpu in filter_visible(TWO, None)] == ["0", "1"]
    assert [gpu.name for gpu in filter_visible(TWO, "1")] == ["1"]
    assert [gpu.name for gpu in filter_visible(TWO, "GPU-a")] == ["0"]
    assert filter_visible(TWO, "") == ()


def names(held: GpuLease | None) -> tuple[str, ...] | None:
    return None if held is None else held.names


def test_each_trial_has_a_card_of_its_own_and_a_free_one_is_taken(tmp_path: Path):
    slots = GpuSlots(gpus=TWO, folder=tmp_path)
    first, second = slots.acquire(8 * GIB), slots.acquire(None)
    assert (names(first), names(second)) == (("0",), ("1",)) and slots.acquire(1 * GIB) is None
    assert second is not None
    second.release()
    assert names(slots.acquire(1 * GIB)) == ("1",)


def test_two_share_a_card_where_their_budgets_fit(tmp_path: Path):
    slots = GpuSlots(gpus=TWO[:1], per_gpu=2, folder=tmp_path)
    first = slots.acquire(40 * GIB)
    assert first is not None and first.names == ("0",)
    assert slots.acquire(41 * GIB) is None and slots.acquire(None) is None
    assert names(slots.acquire(40 * GIB)) == ("0",)
    assert slots.acquire(0) is None  # two slots only
    first.release()
    assert names(slots.acquire(30 * GIB)) == ("0",)


def test_other_processes_places_count_until_they_are_killed(tmp_path: Path):
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom baoc.sweep.gpu_slots import Gpu, GpuSlots\n"
        f"print(GpuSlots(gpus={TWO!r}, folder=Path(sys.argv[1])).acquire(None).names, flush=True)\ntime.sleep(6000)"
    )
    other = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "('0',)\n"
    slots = GpuSlots(gpus=TWO, folder=tmp_path)
    assert names(slots.acquire(None)) == ("1",) and slots.acquire(None) is None
    other.kill()
    other.communicate()
    assert names(slots.acquire(None)) == ("0",)


def test_without_cards_there_is_nothing_to_take(tmp_path: Path):
    assert GpuSlots(gpus=(), folder=tmp_path).acquire(1) == GpuLease()


FOUR = tuple(Gpu(name=str(index), total_bytes=80 * GIB, uuid=f"GPU-{index}") for index in range(4))


def test_a_trial_has_all_of_its_cards_or_none(tmp_path: Path):
    slots = GpuSlots(gpus=FOUR[:3], per_trial=2, folder=tmp_path)
    first = slots.acquire(8 * GIB)
    assert first is not None and first.names == ("0", "1") and slots.acquire(8 * GIB) is None
    first.release()
    assert names(slots.acquire(None)) == ("0", "1")
    assert names(GpuSlots(gpus=FOUR, per_trial=2, folder=tmp_path).acquire(8 * GIB)) == ("2", "3")
    assert GpuSlots(gpus=(), per_trial=2, folder=tmp_path).acquire(1) == GpuLease()
    with pytest.raises(
        BadInputError, match=r"gpus_per_trial=3, and the study may use 2 GPU\(s\) \(0, 1\): choose at most"
    ):
        GpuSlots(gpus=TWO, per_trial=3, folder=tmp_path)


NOTES_CARDS = """
import os, sys, time
with open(os.path.join({folder!r}, "told"), "a") as file:
    file.write(f"{{time.monotonic()}} begin {{os.environ['CUDA_VISIBLE_DEVICES']}} {{sys.argv[-2]}}\\n")
time.sleep(0.2)
"""
ENDS = """
with open(os.path.join({folder!r}, "told"), "a") as file:
    file.write(f"{{time.monotonic()}} end {{os.environ['CUDA_VISIBLE_DEVICES']}} -\\n")
"""


@pytest.mark.slow
def test_trials_of_several_ranks_never_share_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("baoc.sweep.study.find_gpus", lambda _: FOUR)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    given = config(n_trials=6, workers=3, gpus=["0", "1", "2", "3"], gpus_per_trial=2)
    code = NOTES_CARDS.format(folder=str(tmp_path)) + STUB + ENDS.format(folder=str(tmp_path))
    study = run_study(given, folder=tmp_path / "study", code=code)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 6
    lines = sorted(line.split() for line in (tmp_path / "told").read_text().splitlines())
    held: set[str] = set()
    for _, event, cards, devices in lines:
        each = set(cards.split(","))
        assert len(each) == 2 and (devices == "trainer.devices=2" if event == "begin" else each <= held)
        assert event == "end" or not each & held
        held = held | each if event == "begin" else held - each
    assert len(lines) == 12 and not held


def test_devices_of_trials_are_not_among_their_settings():
    for given in ({"fixed": ["trainer.devices=2"]}, {"space": {"trainer.devices": {"choices": [1, 2]}}}):
        with pytest.raises(
            BadInputError, match=r"the study sets trainer.devices: leave it out; hydra.sweeper.gpus_per_tr"
        ):
            config(**given)
