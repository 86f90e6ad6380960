"""Blocks whose states are on the host: the same bits as on the device, and their bytes where the ledger has them."""

import copy
import logging
import pickle
from contextlib import nullcontext

import pytest
import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from torch import Tensor, nn

from baoc.errors import BadInputError
from baoc.kernels import host_memory
from baoc.optim.backends import HostedBackend
from baoc.optim.offload import transfer_order
from baoc.optim.rules import RULES
from baoc.planning.cost import aligned, cost, slab_bytes, state_bytes
from baoc.planning.transfer import buffer_bytes, capacity_bytes, split_into_pieces
from tests.support.optimizing import (
    Gradients,
    assert_same,
    build,
    info,
    make_params,
    one_block,
    run_alike,
    run_steps,
    shapes_for,
    through_file,
    trained,
    twin_of,
    values,
)  # fmt: skip
from tests.support.placing import SHAPES, Twins, rings, states_of

FAMILIES = (
    "adamw_bf16", "adamw_int8_root+bf16_sr", "rmsprop_int8_root+split8", "signum", "adamw_shared_in_int8",
    "adafactor_momentum_int4", "foam_l3+split8", "muon_int8", "column_norm+split8",
)  # fmt: skip


@pytest.mark.parametrize("spec", FAMILIES)
def test_every_family_steps_to_the_same_bits(spec: str) -> None:
    with rings():
        pair = Twins(spec, shapes=shapes_for(spec))
        pair.step(steps=3)
        pair.check()
        assert any(isinstance(backend, HostedBackend) for backend in pair.host.registry.backends)


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_whoever_steps_them(backend: str) -> None:
    with rings():
        pair = Twins("adamw_int8+split8", backend=backend)
        pair.step(steps=3)
        pair.check()
        assert [b.name for b in pair.host.registry.backends] == [f"streamed {backend}"]


def test_a_plan_may_place_any_of_its_blocks() -> None:
    params = make_params(SHAPES)
    twins = twin_of(params)
    specs = {"a": "adamw_int8", "b": "adamw", "c": "lion", "d": "adamw", "e": "sign"}
    placed = {"a": "adamw_int8@streamed", "b": "adamw", "c": "lion@streamed", "d": "adamw@streamed", "e": "sign"}
    one, two, gradients = build(params, specs), build(twins, placed), Gradients(params)
    run_alike((one, two), (params, twins), gradients=gradients, steps=3)
    assert_same(values(params), values(twins))
    assert_same(states_of(one), states_of(two))


# -- bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["adamw_int8+split8", "lion", "foam_l2_int8", "adafactor"])
def test_bytes_are_told_apart_and_equal_the_ledger(spec: str) -> None:
    shapes = shapes_for(spec)
    optimizer = build(make_params(shapes), f"{spec}@streamed")
    slabs = 0
    for block in optimizer.blocks:
        row = optimizer.registry.live[block.name].spec
        rule = RULES[row.rule].info
        told = cost(block, spec=row, rule=rule)
        assert optimizer.block_state_bytes()[block.name] == told.state_bytes
        assert optimizer.block_host_bytes()[block.name] == told.host_bytes
        assert told.state_bytes + told.host_bytes == state_bytes(block, spec=row, rule=rule)
        assert told.host_bytes > 0 or not block.numel
        slabs += slab_bytes(block, spec=row, rule=rule)
    assert optimizer.registry.arena.nbytes == slabs
    assert optimizer.state_bytes() == sum(optimizer.block_state_bytes().values())


def test_buffers_are_what_staging_says() -> None:
    params = make_params(SHAPES)
    sizes = [aligned(4 * param.numel()) * 2 for param in reversed(params.values())]
    with rings(piece_bytes=6000, num_buffers=2):
        streamed = build(params, "adamw@streamed")
        (ring,) = streamed.registry.pipelines
        assert ring.nbytes == buffer_bytes(sizes, piece_bytes=6000, num_buffers=2) == 2 * max(sizes)


@pytest.mark.parametrize(
    ("sizes", "parts"), [([], []), ([9], [[0]]), ([3, 3, 3, 9, 1], [[0, 1], [2], [3], [4]]), ([0, 0, 6], [[0, 1, 2]])]
)
def test_neighbours_travel_together(sizes: list[int], parts: list[list[int]]) -> None:
    pieces = [list(part) for part in split_into_pieces(sizes, piece_bytes=6)]
    assert pieces == parts
    assert all(sum(sizes[i] for i in part) <= capacity_bytes(sizes, piece_bytes=6) for part in pieces)


def test_the_arena_is_one_piece_of_exactly_the_bytes_of_the_slabs() -> None:
    optimizer = build(make_params(SHAPES), "adamw_int8+split8@streamed")
    memory = {
        v.untyped_storage().data_ptr() for s in optimizer.registry.state.values() for k, v in s.items() if k != "step"
    }
    assert len(memory) == 1
    optimizer.migrate({"c": "adamw_int8+split8", "a": "lion@streamed"})
    slabs = [live.slab_bytes for live in optimizer.registry.live.values() if live.on_host]
    assert len(slabs) == 4 and optimizer.registry.arena.nbytes == sum(slabs)
    optimizer.migrate(dict.fromkeys(SHAPES, "adamw"))
    assert optimizer.registry.arena.nbytes == 0


def test_out_of_host_memory_is_said_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 10_000)
    build(make_params({"b": (64,)}), "adamw@streamed")
    with pytest.raises(BadInputError, match=r"host-placed blocks need .* of host memory, and .* give fewer"):
        build(make_params({"a": (64, 64)}), "adamw@streamed")
    optimizer = build(make_params({"a": (64, 64)}), "adamw")
    with pytest.raises(BadInputError, match="host-placed blocks need"):
        optimizer.migrate({"a": "adamw@streamed"})
    assert optimizer.specs == {"a": "adamw"}


def test_one_warning_where_locking_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refused:
        on, refused = False, True

        def __init__(self, memory: Tensor, *, device: torch.device):
            self.device = device

    monkeypatch.setattr("baoc.optim.offload.arena.PageLock", Refused)
    with caplog.at_level(logging.WARNING, logger="baoc.optim.offload.arena"):
        pair = Twins("adamw")
        pair.host.migrate({"b": "adamw"})
        pair.step()
    assert [r.message for r in caplog.records if "refused to lock" in r.message] == [caplog.records[0].message]
    assert not pair.host.registry.arena.locked
    pair.check()


def test_the_arena_of_a_model_that_was_moved_to_a_gpu_is_locked_there(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[int] = []
    monkeypatch.setattr(host_memory, "page_lock", lambda memory, device: bool(locked.append(memory.numel())))
    registry = build(make_params(SHAPES), "adamw@streamed").registry
    blocks = transfer_order(registry.live.values())
    for device in ("cpu", "cuda:0", "cuda:0"):
        registry.arena.gather(blocks, state=registry.state, device=torch.device(device))
    assert locked == [registry.arena.nbytes] and not registry.arena.locked


def test_what_a_container_leaves_is_what_is_available(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    for name, text in {
        "memory.max": "1000",
        "memory.current": "700",
        "memory.stat": "anon 5\ninactive_file 200",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(host_memory, "CGROUPS", ((tmp_path, "memory.max", "memory.current", "inactive_file"),))
    monkeypatch.setattr(host_memory, "system_available_bytes", lambda: 800)  # what it tells changes between two looks
    assert host_memory.available_host_bytes() == 500
    (tmp_path / "memory.max").write_text("max")
    assert host_memory.available_host_bytes() == 800


# -- whoever walks through the states, or changes them --------------------------------------------------------------


def test_lightning_does_not_find_states_to_move() -> None:
    """On a machine without a GPU `meta` stands for one: what is moved there is lost."""
    with rings():
        pair = Twins("adamw_int8")
        pair.step()
        _optimizers_to_device([pair.host], "meta")
        pair.step()
        pair.check()


def test_resume_across_placements() -> None:
    """Compressed bytes are kept, and states come back to where the plan in force has them."""
    with rings():
        pair = Twins("adamw_int8+split8")
        pair.step(steps=2)
        saved = {name: through_file(o.state_dict()) for name, o in (("device", pair.device), ("host", pair.host))}
        for origin in saved:
            other = Twins("adamw_int8+split8")
            for params in (other.params, other.twins):
                for name, param in params.items():
                    param.data.copy_(pair.params[name].data)
            other.device.load_state_dict(saved[origin])
            other.host.load_state_dict(saved[origin])
            assert other.host.load_report is not None and not other.host.load_report.moves
            run = other.host.registry
            assert run.arena.nbytes == sum(live.slab_bytes for live in run.live.values())
            assert_same(states_of(other.host), states_of(pair.device))
            other.step(steps=2)
            other.check()


def test_a_checkpoint_of_other_storage_is_converted_into_states_on_the_host() -> None:
    params, source, _ = trained(SHAPES, "adamw", steps=2)
    device, host = (build(twin_of(params), f"adamw_int8{place}") for place in ("", "@streamed"))
    for optimizer in (device, host):
        optimizer.load_state_dict(source.state_dict())
    assert_same(states_of(device), states_of(host))
    for state in (device.to_adamw_state_dict(), host.to_adamw_state_dict()):
        assert state["state"][0]["step"] == 2


def test_moves_to_the_host_and_back_keep_all_bits() -> None:
    with rings():
        pair = Twins("adamw_int8+split8")
        pair.step(steps=2)
        for target in ("adamw_int8+split8", "adamw_int8+split8@streamed"):
            moves = pair.host.migrate(dict.fromkeys(SHAPES, target))
            assert all(set(move.kept.values()) == {"kept"} for move in moves)
            pair.step(steps=2)
            pair.check()
        pair.device.migrate({"a": "lion_int8"})
        pair.host.migrate({"a": "lion_int8@streamed"})
        pair.step(steps=2)
        pair.check()


def test_weights_that_are_loaded_after_it_was_built_are_seen() -> None:
    with rings():
        pair = Twins("adamw")
        pair.step(steps=2)
        for params in (pair.params, pair.twins):
            for param in params.values():
                param.data.mul_(3.0)  # which autograd does not see
        pair.step()
        pair.check()
        for optimizer in (pair.device, pair.host):
            optimizer.load_weights({"a": torch.ones(SHAPES["a"])})
        assert_same(pair.device.export_weights(), pair.host.export_weights())
        pair.step()
        pair.check()


def test_split_weights_are_exported_and_loaded_with_corrections_on_the_host() -> None:
    with rings():
        pair = Twins("adamw+split8")
        pair.step(steps=2)
        assert_same(pair.device.export_weights(), pair.host.export_weights())
        for optimizer in (pair.device, pair.host):
            optimizer.load_weights({"c": torch.linspace(0, 1, 48 * 40).view(48, 40)})
        pair.step()
        pair.check()


@pytest.mark.parametrize("release", [False, True])
def test_a_model_that_is_loaded_before_the_first_step_is_not_corrected_by_what_was_there(release: bool) -> None:
    with rings():
        pair = Twins("adamw+split8", release=release)
        exact = pair.host.export_weights()
        new = torch.linspace(-1, 1, 48 * 40).view(48, 40).bfloat16()
        with torch.no_grad():
            for params in (pair.params, pair.twins):
                params["a"].copy_(params["a"].clone())  # as it was: its correction stays
                params["c"].copy_(new)
        kept = pair.host.export_weights()
        assert torch.equal(kept["c"], new.float()) and torch.equal(kept["a"], exact["a"])
        pair.step(steps=2)
        pair.check()
        torch.testing.assert_close(pair.host.export_weights()["c"], new.float(), atol=3e-3, rtol=0)


def test_copies_and_two_optimizers_in_one_process() -> None:
    with rings():
        pair = Twins("adamw_int8")
        pair.step(steps=2)
        for other in (copy.deepcopy(pair.host), pickle.loads(pickle.dumps(pair.host))):
            twins = dict(zip(SHAPES, other.param_groups[0]["params"], strict=True))
            assert_same(states_of(other), states_of(pair.host))
            assert other.registry.arena.nbytes == pair.host.registry.arena.nbytes
            reference = copy.deepcopy(pair.device)
            expected = dict(zip(SHAPES, reference.param_groups[0]["params"], strict=True))
            gradients = Gradients(twins, seed=5)
            run_alike((other, reference), (twins, expected), gradients=gradients, steps=2)
            assert_same(values(twins), values(expected))
        pair.step()
        pair.check()


def test_a_copy_of_one_state_that_fills_no_whole_slab() -> None:
    """A copy's states come as tensors of their own, without the padding that a slab has."""
    params = {"w": nn.Parameter(torch.randn(5, 7))}
    optimizer = build(params, "lion_bf16@streamed")
    run_steps(optimizer, params, gradients=Gradients(params), steps=1)
    other = pickle.loads(pickle.dumps(optimizer))
    assert_same(states_of(other), states_of(optimizer))
    assert other.registry.arena.nbytes == optimizer.registry.arena.nbytes == aligned(5 * 7 * 2)


def test_strided_and_late_parameters() -> None:
    with rings():
        pair = Twins("adamw_int8+split8")
        extra = torch.randn(40, 24).t()
        for optimizer, params in ((pair.device, pair.params), (pair.host, pair.twins)):
            optimizer.registry.late_spec = pair.host.specs["a"] if optimizer is pair.host else "adamw_int8+split8"
            params["late"] = nn.Parameter(extra.clone())
            optimizer.add_param_group({"params": [("late", params["late"])], "weight_decay": 0.0})
        pair.gradients = Gradients(pair.params)
        pair.step(steps=3)
        pair.check()


# -- gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["skip_element", "skip_step"])
def test_nonfinite_gradients_and_clipping(policy: str) -> None:
    with rings():
        pair = Twins("adamw_int8", nonfinite=policy)
        for step in range(4):
            pair.gradients.give(pair.params, pair.twins)
            for params, optimizer in ((pair.params, pair.device), (pair.twins, pair.host)):
                if step == 2:
                    params["c"].grad[5, 5] = float("nan")  # pyright: ignore
                optimizer.mask_nonfinite()
                nn.utils.clip_grad_norm_(list(params.values()), 1.0)
                optimizer.step()
        pair.check()
        assert pair.host.num_nonfinite == 1 and pair.host.last_nonfinite == {"c": 1}


# -- refusals ------------------------------------------------------------------------------------------------------


def test_a_model_that_is_cast_after_a_step_is_refused() -> None:
    params = make_params({"a": (33, 64)})
    optimizer = build(params, "adamw+split8@streamed")
    for dtype in (torch.bfloat16, torch.float32):
        params["a"].data = params["a"].data.to(dtype)
        params["a"].grad = torch.ones_like(params["a"])
        with nullcontext() if dtype is torch.bfloat16 else pytest.raises(BadInputError, match="cast a model before"):
            optimizer.step()


def test_a_block_on_two_devices_is_not_placed_on_the_host() -> None:
    params = {"here": nn.Parameter(torch.zeros(4, 8)), "there": nn.Parameter(torch.zeros(4, 8, device="meta"))}
    block = one_block("both", [info(name, (4, 8)) for name in params])
    with pytest.raises(BadInputError, match=r"block both cannot run adamw@streamed: its parameters are on cpu, meta"):
        build(params, {"both": "adamw@streamed"}, blocks=[block])
