"""Reuses the gradient profile of an earlier run for a plan: of the same network, or of a sibling of another size.

What was measured on a block says something of the block of the same role at the same depth in a larger sibling: all of
it is ratios, apart from sizes of gradients and updates. That it carries over is a hypothesis, as any prior is.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baoc.errors import BadInputError
from baoc.types import Block, Profile, Role, read_plain

PROFILE, BLOCKS = "profile.json", "blocks.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A profile, and role and depth of the blocks that it is of."""

    profile: Profile
    places: Mapping[str, tuple[Role, int | None]]

    def depth(self) -> int:
        return max((depth for _, depth in self.places.values() if depth is not None), default=0)


def read_profile(path: Path) -> Stored:
    """The profile in a run folder, or a profile.json with its blocks.json beside it. Raises BadInputError."""
    path = path / PROFILE if path.is_dir() else path
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        blocks: list[Mapping[str, Any]] = json.loads(path.with_name(BLOCKS).read_text(encoding="utf-8"))
        profile = read_plain(Profile, plain)
        places = {str(block["name"]): (Role(block["role"]), block["depth"]) for block in blocks}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInputError(
            f"profile={path} cannot be read ({error}): give the folder of a run that was profiled "
            f"(reallocation=once), which holds {PROFILE} and {BLOCKS}"
        ) from error
    return Stored(profile=profile, places={name: place for name, place in places.items() if name in profile.stats})


def transferred(stored: Stored, *, blocks: Sequence[Block]) -> tuple[Profile, str]:
    """The profile of `blocks`, and a sentence that says where it comes from.

    Blocks of the same network keep their own; else each takes that of the block of its role whose depth, as a share of
    the network's, is nearest. Blocks of a role that was not profiled have no statistics, so priors serve them.
    """
    own = {block.name: (block.role, block.depth) for block in blocks}
    if own.items() <= stored.places.items():
        return stored.profile, f"by the stored profile of {len(own)} blocks"
    depth = max((block.depth for block in blocks if block.depth is not None), default=0)
    source = {block.name: _nearest(block, stored=stored, depth=depth) for block in blocks}
    found = {name: other for name, other in source.items() if other is not None}
    if not found:
        roles = sorted({role.value for role, _ in stored.places.values()})
        raise BadInputError(
            f"the profile is of blocks with roles {', '.join(roles)}, none of which this network has: give the profile "
            "of a sibling, or none"
        )
    profile = replace(stored.profile, stats={name: stored.profile.stats[other] for name, other in found.items()})
    rest = len(source) - len(found)
    text = f"by a sibling's profile, carried over by role and depth to {len(found)} blocks"
    return profile, text + (f"; the other {rest} by priors, as no block of their role was profiled" if rest else "")


def _nearest(block: Block, *, stored: Stored, depth: int) -> str | None:
    """The profiled block of the same role that lies nearest, by share of the network's depth."""
    alike = {name: place for name, (role, place) in stored.places.items() if role == block.role}
    if not alike:
        return None
    whole = stored.depth()

    def distance(place: int | None) -> float:
        if place is None or block.depth is None:
            return 0.0 if place is block.depth else 2.0  # outside the layers or inside them is another thing
        return abs(place / max(whole, 1) - block.depth / max(depth, 1))

    return min(alike, key=lambda name: distance(alike[name]))
