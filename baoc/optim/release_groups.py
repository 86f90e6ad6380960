"""Which blocks are stepped together where gradients are released, by the order in which these came."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol


class Stream(Protocol):
    """What of `torch.cuda.Stream` is needed."""

    def wait_stream(self, stream: Any) -> None: ...


@contextmanager
def in_order(now: Stream | None, others: Iterable[Stream]) -> Iterator[None]:
    """Inside, what is done on stream `now` comes after what was begun on `others`, which afterwards go on behind it.

    Branches of a network may run on streams of their own, and each makes its gradients there: who steps them together
    waits for all, and the memory of a gradient that is dropped is its own stream's to use again.
    """
    apart = [stream for stream in others if stream != now]
    for stream in apart:
        assert now is not None
        now.wait_stream(stream)
    yield
    for stream in apart:
        assert now is not None
        stream.wait_stream(now)


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
    an embedding, costs less than the same bytes at its beginning. A sixteenth of `limit` may be there at any time, so
    that biases and norms before the first matrix need no launch each."""
    groups: list[tuple[str, ...]] = []
    waiting: list[str] = []
    missing, sizes = dict(left), dict.fromkeys(left, 0)
    held = waits = alone = 0
    most = limit // 16
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
