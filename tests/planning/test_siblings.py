"""Stored profiles: read from a run folder, kept for the same network, carried over to a sibling by role and depth."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from baoc.errors import BadInputError
from baoc.planning.stored_profile import read_profile, transferred
from baoc.types import Block, ParamInfo, Profile, Role, to_plain
from tests.support.decision import stats


def network(layers: int, *, head: Role = Role.HEAD) -> list[Block]:
    def block(name: str, role: Role, depth: int | None) -> Block:
        param = ParamInfo(name=f"{name}.weight", shape=(4, 4), dtype="float32", role=role, depth=depth)
        return Block(name=name, params=(param,), role=role, depth=depth)

    inner = [block(f"layers.{i}.{role.value}", role, i) for i in range(layers) for role in (Role.ATTENTION, Role.MLP)]
    return [block("embedding", Role.EMBEDDING, None), *inner, block("head", head, None)]


def folder(tmp_path: Path, blocks: list[Block]) -> Path:
    """A run folder whose block number i has noise i."""
    profile = Profile(stats={b.name: stats(noise=float(i)) for i, b in enumerate(blocks)}, num_samples=3)
    (tmp_path / "profile.json").write_text(json.dumps(to_plain(profile)))
    (tmp_path / "blocks.json").write_text(json.dumps(to_plain(blocks)))
    return tmp_path


def test_the_same_network_keeps_its_profile(tmp_path: Path):
    blocks = network(2)
    stored = read_profile(folder(tmp_path, blocks))
    assert stored == read_profile(tmp_path / "profile.json")
    profile, said = transferred(stored, blocks=blocks)
    assert profile is stored.profile and said == "by the stored profile of 6 blocks"


def test_a_sibling_gives_each_block_that_of_its_role_nearest_in_depth(tmp_path: Path):
    small, large = network(3), network(7)
    profile, said = transferred(read_profile(folder(tmp_path, small)), blocks=large)
    assert said == "by a sibling's profile, carried over by role and depth to 16 blocks"
    number = {block.name: float(i) for i, block in enumerate(small)}
    noise = {name: found.noise for name, found in profile.stats.items()}
    assert noise["embedding"] == number["embedding"] and noise["head"] == number["head"]
    mlp = [noise[f"layers.{i}.mlp"] for i in range(7)]
    assert mlp == [number[f"layers.{i}.mlp"] for i in (0, 0, 1, 1, 1, 2, 2)]


def test_a_role_that_was_not_profiled_is_left_to_priors(tmp_path: Path):
    stored = read_profile(folder(tmp_path, network(2)))
    profile, said = transferred(stored, blocks=network(2, head=Role.MODULATION))
    assert "head" not in profile.stats
    assert said.endswith("; the other 1 by priors, as no block of their role was profiled")
    with pytest.raises(BadInputError, match="with roles attention, embedding, head, mlp, none of which this network"):
        transferred(stored, blocks=[replace(network(1)[0], role=Role.CONV)])


def test_what_is_no_profile_is_refused(tmp_path: Path):
    with pytest.raises(BadInputError, match=r"profile.json cannot be read .*No such file.*give the folder of a run"):
        read_profile(tmp_path)
    folder(tmp_path, network(1))
    for name, text in (("blocks.json", "[{}]"), ("profile.json", '{"stats": 3}'), ("profile.json", "[")):
        (tmp_path / name).write_text(text)
        with pytest.raises(BadInputError, match="cannot be read"):
            read_profile(tmp_path)
