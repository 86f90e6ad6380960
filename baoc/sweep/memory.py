"""Memory that trials share: whether the machine ran out of it, and which card has room for one more trial."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from baoc.errors import BadInputError

_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))


def num_out_of_memory(counters: Sequence[Path] = _COUNTERS) -> int:
    """How many processes the kernel has killed for memory so far, here; 0 where it does not tell."""
    for file in counters:
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One GPU as CUDA_VISIBLE_DEVICES names it."""

    name: str
    total_bytes: int
    uuid: str = ""


def cards_here(asked: str | Sequence[str] = "auto") -> tuple[Card, ...]:
    """The GPUs of this machine, without CUDA: `auto` are those that CUDA_VISIBLE_DEVICES allows, a list names some.

    Raises BadInputError for a name that is not among them.
    """
    if not isinstance(asked, str) and not asked:
        return ()
    smi = shutil.which("nvidia-smi")
    query = [str(smi), "--query-gpu=index,memory.total,uuid", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False) if smi else None
    found = parse_cards(done.stdout if done is not None and done.returncode == 0 else "")
    if asked == "auto":
        return visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))
    names = [asked] if isinstance(asked, str) else [str(name) for name in asked]
    by_name = {card.name: card for card in found}
    for name in names:
        if name not in by_name:
            raise BadInputError(f"hydra.sweeper.gpus has {name!r}: allowed are {', '.join(by_name) or 'none, []'}")
    return tuple(by_name[name] for name in names)


def parse_cards(text: str) -> tuple[Card, ...]:
    """`index, MiB, uuid` lines of nvidia-smi."""
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines() if line.count(",") == 2]
    return tuple(Card(name=row[0], total_bytes=int(float(row[1])) * 2**20, uuid=row[2]) for row in rows)


def visible(cards: Sequence[Card], asked: str | None) -> tuple[Card, ...]:
    """What CUDA_VISIBLE_DEVICES leaves, by indices or (beginnings of) UUIDs; all where it is not set."""
    if asked is None:
        return tuple(cards)
    names = [name.strip() for name in asked.split(",") if name.strip()]
    return tuple(card for card in cards if any(card.name == n or (card.uuid + " ").startswith(n) for n in names))


class Places:
    """Which trial runs on which card, agreed among all studies of a user on this machine by locked files.

    A card has `per_card` places. A trial whose memory budget is known shares it with others that fit beside it; one
    whose budget is not known takes it alone. A process that is killed gives its places back.
    """

    def __init__(self, *, cards: Sequence[Card], per_card: int = 1, folder: Path | None = None):
        self.cards, self.per_card = tuple(cards), per_card
        self.folder = folder or Path(tempfile.gettempdir()) / f"baoc_cards_{os.getuid()}"
        self._held: dict[str, list[int]] = {}  # card -> open files, whose locks are the places

    def take(self, budget_bytes: int | None) -> str | None:
        """The emptiest card with room, which is then held; None where there is none."""
        if not self.cards:
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        guard = os.open(self.folder / "guard", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(guard, fcntl.LOCK_EX)
            held = {card.name: self._bytes_on(card) for card in self.cards}
            fitting = [card for card in self.cards if self._fits(card, budget_bytes, held[card.name])]
            if not fitting:
                return None
            card = min(fitting, key=lambda card: len(held[card.name]))
            self._hold(card, card.total_bytes if budget_bytes is None else budget_bytes)
            return card.name
        finally:
            os.close(guard)

    def give_back(self, name: str, budget_bytes: int | None) -> None:
        """One place that `take` gave for this budget."""
        total = next(card.total_bytes for card in self.cards if card.name == name)
        for file in self._held[name]:
            if _read(file) == (total if budget_bytes is None else budget_bytes):
                self._held[name].remove(file)
                os.close(file)
                return

    def _fits(self, card: Card, budget_bytes: int | None, held: Sequence[int]) -> bool:
        if not held:
            return True  # a budget above the card is the run's to refuse
        return len(held) < self.per_card and budget_bytes is not None and sum(held) + budget_bytes <= card.total_bytes

    def _bytes_on(self, card: Card) -> list[int]:
        """What each place in use was given, whoever holds it."""
        told = []
        for file in self.folder.glob(f"{card.name}_*"):
            opened = os.open(file, os.O_RDWR)
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                told.append(_read(opened))
            finally:
                os.close(opened)
        return told

    def _hold(self, card: Card, num_bytes: int) -> None:
        """Locks the first free file of the card; the guard is held."""
        for place in count():
            file = os.open(self.folder / f"{card.name}_{place}", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(file)
                continue
            os.ftruncate(file, 0)
            os.pwrite(file, str(num_bytes).encode(), 0)
            self._held.setdefault(card.name, []).append(file)
            return


def _read(file: int) -> int:
    return int(os.pread(file, 32, 0) or b"0")
