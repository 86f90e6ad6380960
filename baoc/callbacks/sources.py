"""Keeps in checkpoints what a run is made of beside its settings: hashes of the user's code and of the data."""

from collections.abc import Mapping
from typing import Any

import lightning as L


class Sources(L.Callback):
    """`hashes`: what is meant (`model=net.py:build`, `dataset=images`) -> SHA-256. A resumed run goes on with those of
    today."""

    def __init__(self, hashes: Mapping[str, str]):
        self.hashes = dict(hashes)

    def state_dict(self) -> dict[str, Any]:
        return {"hashes": dict(self.hashes)}


def changed_sources(content: Mapping[str, Any], *, now: Mapping[str, str]) -> list[str]:
    """A sentence for each source that a checkpoint's `content` has with another hash; those it does not know pass."""
    then: Mapping[str, str] = content.get("callbacks", {}).get(Sources.__qualname__, {}).get("hashes", {})
    return [
        f"{what} has changed since the checkpoint (sha256 {then[what][:12]} then, {sha[:12]} now): the run goes on "
        "with what it is now"
        for what, sha in now.items()
        if then.get(what, sha) != sha
    ]
