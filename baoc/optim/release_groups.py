"""Which blocks are stepped together where gradients are released, by the order in which these came."""

from collections.abc import Callable, Mapping, Sequence


def together(
    order: Sequence[tuple[str, int]],
    *,
    left: Mapping[str, int],
    limit: int,
    joins: Callable[[str, str], bool],
) -> list[tuple[str, ...]]:
    """Blocks that are stepped together, where gradients come in `order` (block, bytes) and a block has `left` of them:
    one after the other, up to `limit` bytes, and so that never more is there than where each is stepped alone."""
    most = _held(order, left=left)
    groups: list[tuple[str, ...]] = []
    waiting: list[str] = []
    missing, sizes = dict(left), dict.fromkeys(left, 0)
    held = waits = 0
    for name, num_bytes in order:
        if waiting and held + num_bytes > most:
            groups, waiting, held, waits = [*groups, tuple(waiting)], [], held - waits, 0
        held, missing[name], sizes[name] = held + num_bytes, missing[name] - 1, sizes[name] + num_bytes
        if missing[name]:
            continue
        if waiting and (waits + sizes[name] > limit or not joins(waiting[0], name)):
            groups, waiting, held, waits = [*groups, tuple(waiting)], [], held - waits, 0
        waiting, waits = [*waiting, name], waits + sizes[name]
    return [*groups, tuple(waiting)] if waiting else groups


def _held(order: Sequence[tuple[str, int]], *, left: Mapping[str, int]) -> int:
    """The most bytes of gradients at once, where a block's go when it has the last of them."""
    missing, sizes, held, most = dict(left), dict.fromkeys(left, 0), 0, 0
    for name, num_bytes in order:
        held, missing[name], sizes[name] = held + num_bytes, missing[name] - 1, sizes[name] + num_bytes
        most = max(most, held)
        held -= 0 if missing[name] else sizes[name]
    return most
