"""Which gpu a trial gets: its own, or one that budgets fit together; agreed among processes, freed if killed."""

import subprocess
import sys
from pathlib import Path

from baoc.sweep.gpu_slots import Gpu, GpuSlots, filter_visible, parse_gpus
from tests.support.paths import ROOT

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


def test_each_trial_has_a_card_of_its_own_and_a_free_one_is_taken(tmp_path: Path):
    slots = GpuSlots(gpus=TWO, folder=tmp_path)
    assert [slots.acquire(8 * GIB), slots.acquire(None)] == ["0", "1"]
    assert slots.acquire(1 * GIB) is None
    slots.release("1", None)
    assert slots.acquire(1 * GIB) == "1"


def test_two_share_a_card_where_their_budgets_fit(tmp_path: Path):
    slots = GpuSlots(gpus=TWO[:1], per_gpu=2, folder=tmp_path)
    assert slots.acquire(40 * GIB) == "0"
    assert slots.acquire(41 * GIB) is None and slots.acquire(None) is None
    assert slots.acquire(40 * GIB) == "0"
    assert slots.acquire(0) is None  # two slots only
    slots.release("0", 40 * GIB)
    assert slots.acquire(30 * GIB) == "0"


def test_other_processes_places_count_until_they_are_killed(tmp_path: Path):
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom baoc.sweep.gpu_slots import Gpu, GpuSlots\n"
        f"print(GpuSlots(gpus={TWO!r}, folder=Path(sys.argv[1])).acquire(None), flush=True)\ntime.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "0\n"
    slots = GpuSlots(gpus=TWO, folder=tmp_path)
    assert slots.acquire(None) == "1" and slots.acquire(None) is None
    other.kill()
    other.communicate()
    assert slots.acquire(None) == "0"


def test_without_cards_there_is_nothing_to_take(tmp_path: Path):
    assert GpuSlots(gpus=(), folder=tmp_path).acquire(1) is None
