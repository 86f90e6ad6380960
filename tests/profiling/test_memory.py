"""Context, free memory and cap: nothing off CUDA; on CUDA the arithmetic, with the card's answers given."""

import os
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from baoc.errors import BadInputError
from baoc.profiling import cap_device, context_bytes, current_context_bytes, free_bytes, memory, recap_device, uncapped
from baoc.types import Budget
from baoc.units import GIB, MIB


def test_a_cpu_has_no_context_and_no_cap():
    assert context_bytes("cpu") == 0
    cap_device("cpu", budget=Budget(name="1b", memory_bytes=1))
    assert 64 * MIB < free_bytes("cpu") < 2**50


class Card:
    """Answers for torch.cuda: 80 GiB, of which `used` is somebody's and `reserved` torch's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, nvml: bool = True):
        self.total, self.others, self.context, self.reserved, self.allocated = 80 * GIB, 3 * GIB, 0, 0, 0
        self.fraction: float | None = None
        self.settings: list[str] = []
        self.initialized = False
        monkeypatch.setattr(memory, "free_at_start", {})
        monkeypatch.setattr(memory, "first_context", {})
        monkeypatch.setattr(memory, "settled_context", {})
        self.own: int | None = None
        monkeypatch.setattr(memory, "nvml_free", lambda index: self.free if nvml else None)
        monkeypatch.setattr(memory, "nvml_own", lambda index: self.own)
        monkeypatch.setattr(memory, "allocator_settings", lambda: self.settings.append)
        monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
        monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
        monkeypatch.setattr(memory.torch, "zeros", lambda *_, **__: self.start())
        for name, answer in {
            "is_initialized": lambda: self.initialized,
            "mem_get_info": lambda index: (self.start().free, self.total),
            "memory_reserved": lambda index: self.reserved,
            "memory_allocated": lambda index: self.allocated,
            "get_device_properties": lambda index: SimpleNamespace(total_memory=self.total),
            "set_per_process_memory_fraction": lambda fraction, index: setattr(self, "fraction", fraction),
            "current_device": lambda: 0,
            "empty_cache": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)

    @property
    def free(self) -> int:
        return self.total - self.others - self.context - self.reserved

    def start(self) -> "Card":
        """Anything that touches the device makes the context."""
        self.initialized, self.context = True, max(self.context, GIB // 2)
        return self


def test_context_is_the_fall_of_free_memory_less_torch_s_own(monkeypatch):
    card = Card(monkeypatch)
    assert current_context_bytes("cuda:0") == GIB // 2
    card.reserved, card.context = 7 * GIB, GIB  # kernels have loaded
    assert current_context_bytes("cuda:0") == GIB


def test_what_other_processes_take_meanwhile_is_no_context_where_the_driver_tells_them_apart(monkeypatch):
    card = Card(monkeypatch)
    current_context_bytes("cuda:0")
    card.reserved, card.others = 7 * GIB, 20 * GIB
    assert current_context_bytes("cuda:0") == 17 * GIB + GIB // 2
    card.own = 7 * GIB + GIB // 2
    assert current_context_bytes("cuda:0") == GIB // 2


def test_kernels_that_load_take_of_the_room_that_was_kept_for_them(monkeypatch):
    """So a process that plans early and one that plans late come to the same, until that room is nearly used up."""
    card = Card(monkeypatch)
    early, late, last = memory.EARLY_MODULES_BYTES, memory.LATE_MODULES_BYTES, memory.LAST_MODULES_BYTES
    assert context_bytes("cuda:0") == GIB // 2 + early and current_context_bytes("cuda:0") == GIB // 2
    card.context = settled = GIB // 2 + 100 * MIB  # a forward and backward was run
    assert memory.fix_context_bytes("cuda:0") == settled == context_bytes("cuda:0")
    card.context = settled + late - last
    assert memory.fix_context_bytes("cuda:0") == settled == context_bytes("cuda:0")
    cap_device("cuda:0", budget=Budget(name="8gb", memory_bytes=8 * GIB))
    assert card.fraction == pytest.approx((8 * GIB - settled - late) / (80 * GIB))
    card.context += MIB
    assert context_bytes("cuda:0") == settled + MIB
    assert context_bytes("cpu") == memory.fix_context_bytes("cpu") == 0


def test_what_other_processes_give_back_meanwhile_makes_no_context_smaller(monkeypatch):
    """Seen on an H200 that others used as well: a plan charged half of the context."""
    card = Card(monkeypatch)
    context_bytes("cuda:0")
    card.context, card.others = GIB // 2 + 100 * MIB, 2 * GIB
    assert memory.fix_context_bytes("cuda:0") == context_bytes("cuda:0") == GIB // 2
    card.own = card.context
    assert current_context_bytes("cuda:0") == GIB // 2 + 100 * MIB
    grown = 100 * MIB + memory.LAST_MODULES_BYTES - memory.LATE_MODULES_BYTES
    assert context_bytes("cuda:0") == GIB // 2 + grown


class Library:
    """An NVML that lists these processes: pid -> bytes."""

    def __init__(self, processes):
        self.processes = processes

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle, count, processes):
        for place, (pid, used) in zip(processes, self.processes.items(), strict=False):
            place.pid, place.used = pid, used
        count._obj.value = len(self.processes)
        return 0


@pytest.mark.parametrize(
    ("before", "processes", "own"),
    [
        ((), {1: 5, os.getpid(): 7}, 7),
        ((), {1: 5}, 5),  # alone, under another number
        ((1,), {1: 5, 2: 6}, 6),  # beside others, under another number
        ((), {1: 5, 2: 6}, None),
        ((1,), {1: 5}, None),
        ((), {os.getpid(): 2**64 - 1}, None),
        ((), {}, None),
    ],
)
def test_own_bytes_by_the_driver(monkeypatch, before, processes, own):
    @contextmanager
    def library(index):
        yield Library(processes), None

    monkeypatch.setattr(memory, "nvml", library)
    monkeypatch.setattr(memory, "others_at_start", {0: frozenset(before)})
    monkeypatch.setattr(memory, "own_pid", {})
    assert memory.nvml_own(0) == own
    processes[3] = 8  # which comes later
    assert memory.nvml_own(0) == own


def test_without_a_reading_from_before_all_that_is_not_torch_s_counts(monkeypatch):
    card = Card(monkeypatch, nvml=False)
    card.reserved = 2 * GIB
    assert current_context_bytes("cuda") == 3 * GIB + GIB // 2


def test_auto_is_what_the_card_had_free_and_what_torch_holds_unused(monkeypatch):
    card = Card(monkeypatch)
    assert free_bytes("cuda:0") == 77 * GIB
    card.reserved, card.allocated = 4 * GIB, GIB
    assert free_bytes("cuda:0") == 77 * GIB - GIB


def test_the_cap_leaves_room_for_context_and_late_modules(monkeypatch):
    card = Card(monkeypatch)
    cap_device("cuda:0", budget=Budget(name="8gb", memory_bytes=8 * GIB))
    later = memory.EARLY_MODULES_BYTES + memory.LATE_MODULES_BYTES
    assert card.fraction == pytest.approx((8 * GIB - GIB // 2 - later) / (80 * GIB))
    cap_device("cuda:0", budget=Budget(name="state_25", state_fraction=0.25))
    cap_device("cuda:0", budget=Budget(name="100gb", memory_bytes=100 * GIB))
    assert card.fraction == 1.0


def test_a_budget_that_does_not_limit_memory_takes_the_cap_of_the_one_before_away(monkeypatch):
    card = Card(monkeypatch)
    recap_device("cuda:0", budget=Budget(name="8gb", memory_bytes=8 * GIB))
    assert card.fraction is not None and card.fraction < 0.1
    recap_device("cuda:0", budget=Budget(name="state_25", state_fraction=0.25))
    assert card.fraction == 1.0


def test_a_budget_below_the_context_is_refused(monkeypatch):
    Card(monkeypatch)
    with pytest.raises(BadInputError, match=r"300mb is 300 MiB, of which the CUDA context alone takes 744 MiB"):
        cap_device("cuda:0", budget=Budget(name="300mb", memory_bytes=300 * MIB))


def test_the_allocator_grows_in_place_unless_the_user_has_set_it(monkeypatch):
    card = Card(monkeypatch)
    cap_device("cuda:0", budget=Budget(name="unlimited"))
    assert card.settings == ["expandable_segments:True"] and card.fraction is None
    cap_device("cpu", budget=Budget(name="8gb", memory_bytes=8 * GIB))
    assert len(card.settings) == 1 and card.fraction is None
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    cap_device("cuda:0", budget=Budget(name="8gb", memory_bytes=8 * GIB))
    assert len(card.settings) == 1 and card.fraction is not None


@pytest.mark.slow
def test_a_look_without_the_cap_ends_with_it(monkeypatch):
    card = Card(monkeypatch)
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda where: done.append("forgotten"))
    budget = Budget(name="8gb", memory_bytes=8 * GIB)
    with pytest.raises(KeyError), uncapped("cuda:0", budget=budget):
        assert card.fraction == 1.0
        raise KeyError("whatever")
    assert card.fraction is not None and 0.09 < card.fraction < 0.1 and done[-1] == "forgotten"
    tight = Budget(name="64mb", memory_bytes=2**26)
    with pytest.raises(KeyError, match="whatever"), uncapped("cuda:0", budget=tight):
        raise KeyError("whatever")  # not that the context alone takes such a budget
    with pytest.raises(BadInputError, match="context alone"), uncapped("cuda:0", budget=tight):
        pass


def test_a_look_that_is_collected_sets_no_cap(monkeypatch):
    """As at the interpreter's end, where names of modules are gone."""
    look = uncapped("cpu", budget=Budget(name="8gb", memory_bytes=8 * GIB))
    look.__enter__()
    monkeypatch.setattr(memory, "suppress", None)
    look.gen.close()
