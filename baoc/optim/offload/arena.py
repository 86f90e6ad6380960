"""The CPU memory of an optimizer's host-placed states: one allocation of exactly their bytes, locked for the GPU."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baoc.kernels.host_memory import PageLock, allocate_host_memory
from baoc.optim.state import LiveBlock, State, initial_states, slab_views
from baoc.units import format_bytes

log = logging.getLogger(__name__)


def slab_of(live: LiveBlock, state: dict[Tensor, State]) -> Tensor:
    """The slab (uint8) of a host-placed block, which must have state, as a view of its storage."""
    slot = next(slot for slot in live.slots if slot.tensors)
    first = state[slot.param][slot.tensors[0].key]
    begin = first.storage_offset() * first.element_size()
    storage = torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())
    return storage[begin : begin + live.slab_bytes]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Segment:
    memory: Tensor
    lock: PageLock

    def holds(self, slab: Tensor) -> bool:
        return slab.untyped_storage().data_ptr() == self.memory.data_ptr()


class HostArena:
    """Slabs of host-placed blocks in few segments of host memory, which hold exactly their bytes: one, until blocks
    move. When some leave a segment, its other slabs move to a new one with the new, existing twice meanwhile."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._warned = False

    @property
    def nbytes(self) -> int:
        return sum(segment.memory.nbytes for segment in self._segments)

    @property
    def locked(self) -> bool:
        """True if all segments are page-locked, so that copies to and from a GPU run beside the caller."""
        return not any(segment.lock.refused for segment in self._segments)

    def gather(
        self, blocks: Iterable[LiveBlock], *, state: dict[Tensor, State], device: torch.device | None = None
    ) -> bool:
        """Moves the blocks' slabs into the arena, in order. Returns True if any moved.

        They are locked for `device`, by default that of the blocks' parameters, which may have moved. Raises
        BadInputError if host memory is short.
        """
        blocks = list(blocks)
        slabs = [(live, slab_of(live, state)) for live in blocks if live.slab_bytes]
        used = {id(segment): 0 for segment in self._segments}
        segments = []  # of each slab; None if it is outside of the arena
        for _, slab in slabs:
            segment = next((segment for segment in self._segments if segment.holds(slab)), None)
            segments.append(segment)
            if segment is not None:
                used[id(segment)] += slab.nbytes
        full = {id(segment) for segment in self._segments if used[id(segment)] == segment.memory.nbytes}
        moving = [live for (live, _), segment in zip(slabs, segments, strict=True) if id(segment) not in full]
        if moving:
            del slabs, slab  # pyright: ignore[reportPossiblyUnboundVariable]
            full.add(id(self._move(moving, state=state)))
        self._segments = [segment for segment in self._segments if id(segment) in full]
        for index, segment in enumerate(self._segments):
            lock_device = device or blocks[0].slots[0].param.device
            if segment.lock.device.type != lock_device.type:
                self._segments[index] = self._locked(segment.memory, device=lock_device)
        return bool(moving)

    def reserve(self, blocks: Sequence[LiveBlock], *, device: torch.device | None) -> dict[LiveBlock, list[State]]:
        """Allocates the states of host-placed blocks in the arena before the first step, so that no copy ever exists;
        none for parameters on meta. `device`: where these are to be. Raises BadInputError if host memory is short."""
        blocks = [live for live in blocks if live.slab_bytes]
        device = device or next((live.slots[0].param.device for live in blocks), torch.device("meta"))
        if not blocks or device.type == "meta":
            return {}
        memory, begin = self._segment(sum(live.slab_bytes for live in blocks), device=device).memory, 0
        states: dict[LiveBlock, list[State]] = {}
        for live in blocks:
            states[live] = initial_states(live.slots)
            for slot, state in zip(live.slots, states[live], strict=True):
                state |= slab_views(slot, memory, begin=begin)
                begin += slot.slab_bytes
        return states

    def _segment(self, nbytes: int, *, device: torch.device) -> _Segment:
        memory = allocate_host_memory(nbytes, what="the states of host-placed blocks")
        self._segments.append(self._locked(memory, device=device))
        return self._segments[-1]

    def _locked(self, memory: Tensor, *, device: torch.device) -> _Segment:
        segment = _Segment(memory=memory, lock=PageLock(memory, device=device))
        if segment.lock.refused and not self._warned:
            self._warned = True
            log.warning(
                "the system refused to lock %s of host memory for host-placed states (see `ulimit -l`): copies to and "
                "from the GPU wait for each other, so steps take longer",
                format_bytes(memory.nbytes),
            )
        return segment

    def _move(self, blocks: list[LiveBlock], *, state: dict[Tensor, State]) -> _Segment:
        """Copies the blocks' slabs to a new segment."""
        segment = self._segment(sum(live.slab_bytes for live in blocks), device=blocks[0].slots[0].param.device)
        memory, begin = segment.memory, 0
        for live in blocks:
            memory[begin : begin + live.slab_bytes].copy_(slab_of(live, state))
            for slot in live.slots:
                state[slot.param].update(slab_views(slot, memory, begin=begin))
                begin += slot.slab_bytes
        return segment
