"""Memory that trials share: whether the machine ran out of it, and which card has room for one more trial."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
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


def cards_here(asked: str | Sequence[str] = "auto") -> tuple[Card, ...]:
    """The GPUs of this machine, without CUDA: `auto` are those of nvidia-smi, a list names some of them.

    Raises BadInputError for a name that is not among them.
    """
    if not isinstance(asked, str) and not asked:
        return ()
    smi = shutil.which("nvidia-smi")
    query = [str(smi), "--query-gpu=index,memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False) if smi else None
    text = done.stdout if done is not None and done.returncode == 0 else ""
    found = parse_cards(text)
    if asked == "auto":
        return found
    names = [asked] if isinstance(asked, str) else [str(name) for name in asked]
    by_name = {card.name: card for card in found}
    for name in names:
        if name not in by_name:
            raise BadInputError(f"hydra.sweeper.gpus has {name!r}: allowed are {', '.join(by_name) or 'none, []'}")
    return tuple(by_name[name] for name in names)


def parse_cards(text: str) -> tuple[Card, ...]:
    """`index, MiB` lines of nvidia-smi."""
    rows = [line.split(",") for line in text.splitlines() if "," in line]
    return tuple(Card(name=row[0].strip(), total_bytes=int(float(row[1])) * 2**20) for row in rows)


@dataclass(slots=True, kw_only=True)
class Places:
    """Which card runs what. A trial whose budget is known shares a card with others that fit beside it."""

    cards: tuple[Card, ...]
    per_card: int = 1
    held: dict[str, list[int]] = field(default_factory=dict)  # card -> bytes of each trial on it; all where unknown

    def take(self, budget_bytes: int | None) -> str | None:
        """The emptiest card with room, which is then held; None where there is none."""
        fitting = [card for card in self.cards if self._fits(card, budget_bytes)]
        if not fitting:
            return None
        card = min(fitting, key=lambda card: len(self.held.get(card.name, ())))
        self.held.setdefault(card.name, []).append(card.total_bytes if budget_bytes is None else budget_bytes)
        return card.name

    def give_back(self, name: str, budget_bytes: int | None) -> None:
        total = next(card.total_bytes for card in self.cards if card.name == name)
        self.held[name].remove(total if budget_bytes is None else budget_bytes)

    def _fits(self, card: Card, budget_bytes: int | None) -> bool:
        held = self.held.get(card.name, [])
        if not held:
            return True  # a budget above the card is the run's to refuse
        return len(held) < self.per_card and budget_bytes is not None and sum(held) + budget_bytes <= card.total_bytes
