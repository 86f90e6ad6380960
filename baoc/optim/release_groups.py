"""Which blocks are stepped together where gradients are released, by the order in which these came."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager

import torch

StreamId = tuple[int, int, int]  # what torch calls a CUDA stream by: its number, device index and device type


def stream_now(device: torch.device) -> StreamId:
    """The current stream of a CUDA device. torch.cuda.current_stream makes an object of it, for three times the price,
    and it is asked for with every gradient."""
    return torch._C._cuda_getCurrentStream(device.index)


@contextmanager
def in_order(streams: Set[StreamId]) -> Iterator[None]:
    """Inside, what is done on the current stream comes after what was begun on `streams` of its device; afterwards they
    go on behind it.

    Branches of a network may run on streams of their own, and each makes its gradients there: who steps them together
    waits for all, and the memory of a gradient that is dropped is its own stream's to use again.
    """
    now = stream_now(torch.device("cuda", next(iter(streams))[1])) if streams else None
    if now is None or streams == {now}:
        yield
        return
    here = _stream(now)
    apart = [_stream(one) for one in streams if one != now]
    for stream in apart:
        here.wait_stream(stream)
    yield
    for stream in apart:
        stream.wait_stream(here)


def _stream(name: StreamId) -> torch.cuda.Stream:
    number, index, kind = name
    return torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)


def together(
    order: Sequence[tuple[str, int]],
    *,
    left: Mapping[str, int],
    limit: int,
    joins: Callable[[str, str], bool],
) -> list[tuple[str, ...]]:
    """Blocks that are stepped together, where gradients come in `order` (block, bytes) and a block has `left` of them:
    one after the other, up to `limit` bytes, and so that never more is there than was by then where each is stepped
    alone. By then, and not in all: activations go as backward goes on, so that a peak of gradients at its end, as of
    an embedding, costs less than the same bytes at its beginning. A 64th of `limit` may be there at any time, so that
    biases and norms before the first matrix need no launch each."""
    groups: list[tuple[str, ...]] = []
    waiting: list[str] = []
    missing, sizes = dict(left), dict.fromkeys(left, 0)
    held = waits = alone = 0
    most = limit // 64
    for name, num_bytes in order:
        alone += num_bytes
        most = max(most, alone)
        if waiting and held + num_bytes > most:
            groups, waiting, held, waits = [*groups, tuple(waiting)], [], held - waits, 0
        held, missing[name], sizes[name] = held + num_bytes, missing[name] - 1, sizes[name] + num_bytes
        if missing[name]:
            continue
        alone -= sizes[name]
        if waiting and (waits + sizes[name] > limit or not joins(waiting[0], name)):
            groups, waiting, held, waits = [*groups, tuple(waiting)], [], held - waits, 0
        waiting, waits = [*waiting, name], waits + sizes[name]
    return [*groups, tuple(waiting)] if waiting else groups
