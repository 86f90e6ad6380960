"""Which card a trial gets: its own, or one that budgets fit together; agreed among processes, freed if killed."""

import subprocess
import sys
from pathlib import Path

from baoc.sweep.memory import Card, Places, parse_cards, visible
from tests.support.paths import ROOT

GIB = 2**30
TWO = (Card(name="0", total_bytes=80 * GIB, uuid="GPU-aa"), Card(name="1", total_bytes=80 * GIB, uuid="GPU-bb"))


def test_nvidia_smi_is_read_and_visible_devices_are_kept_to():
    cards = parse_cards("0, 81559, GPU-aa\n1, 81559, GPU-bb\nNo devices\n")
    assert [(card.name, card.total_bytes, card.uuid) for card in cards] == [
        ("0", 81559 * 2**20, "GPU-aa"),
        ("1", 81559 * 2**20, "GPU-bb"),
    ]
    assert [card.name for card in visible(TWO, None)] == ["0", "1"]
    assert [card.name for card in visible(TWO, "1")] == ["1"]
    assert [card.name for card in visible(TWO, "GPU-a")] == ["0"]
    assert visible(TWO, "") == ()


def test_each_trial_has_a_card_of_its_own_and_a_free_one_is_taken(tmp_path: Path):
    places = Places(cards=TWO, folder=tmp_path)
    assert [places.take(8 * GIB), places.take(None)] == ["0", "1"]
    assert places.take(1 * GIB) is None
    places.give_back("1", None)
    assert places.take(1 * GIB) == "1"


def test_two_share_a_card_where_their_budgets_fit(tmp_path: Path):
    places = Places(cards=TWO[:1], per_card=2, folder=tmp_path)
    assert places.take(40 * GIB) == "0"
    assert places.take(41 * GIB) is None and places.take(None) is None
    assert places.take(40 * GIB) == "0"
    assert places.take(0) is None  # two places only
    places.give_back("0", 40 * GIB)
    assert places.take(30 * GIB) == "0"


def test_other_processes_places_count_until_they_are_killed(tmp_path: Path):
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom baoc.sweep.memory import Card, Places\n"
        f"print(Places(cards={TWO!r}, folder=Path(sys.argv[1])).take(None), flush=True)\ntime.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "0\n"
    places = Places(cards=TWO, folder=tmp_path)
    assert places.take(None) == "1" and places.take(None) is None
    other.kill()
    other.communicate()
    assert places.take(None) == "0"


def test_without_cards_there_is_nothing_to_take(tmp_path: Path):
    assert Places(cards=(), folder=tmp_path).take(1) is None
