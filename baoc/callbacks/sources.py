"""Stores hashes of the user's code and data in checkpoints, to warn when a run resumes with others."""

from collections.abc import Mapping
from typing import Any

import lightning as L


class Sources(L.Callback):
    """`hashes`: SHA-256 by source, such as `model=net.py:build` or `dataset=images`. A resumed run stores its own."""

    def __init__(self, hashes: Mapping[str, str]):
        self.hashes = dict(hashes)

    def state_dict(self) -> dict[str, Any]:
        return {"hashes": dict(self.hashes)}


def changed_sources(content: Mapping[str, Any], *, now: Mapping[str, str]) -> list[str]:
    """A sentence for each source whose hash in the checkpoint's `content` differs from the one `now`."""
    then: Mapping[str, str] = content.get("callbacks", {}).get(Sources.__qualname__, {}).get("hashes", {})
    return [
        f"{what} has changed since the checkpoint (sha256 {then[what][:12]} then, {sha[:12]} now): the run goes on "
        "with what it is now"
        for what, sha in now.items()
        if then.get(what, sha) != sha
    ]
