"""BlockwiseOptimizer over fully_shard: with equal gradients the same numbers at 1, 2 and 4 ranks, uneven and empty
parts included, through checkpoints that any number of ranks reads."""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from baoc import BaocOptimizer
from baoc.core.catalogue import NATIVE, STORAGES
from baoc.core.rule_tags import RULE_INFOS
from baoc.errors import BadInputError, DivergedError
from baoc.optim import BlockwiseOptimizer
from baoc.optim.groups import param_info, single_block
from baoc.optim.nonfinite import POLICIES
from baoc.optim.shards import ShardGroup, check_codec_groups, local_shard, unsharded
from baoc.planning.candidates import sums_columns, why_inapplicable
from baoc.profiling import GradientProfiler
from baoc.profiling.footprint import step_temporary_bytes
from baoc.profiling.step_temporaries import step_temporaries
from baoc.types import ParamInfo, Role
from tests.support.interpreting import INTERPRETING
from tests.support.placing import rings
from tests.support.ranks import forked_from_here, group, in_processes

pytestmark = pytest.mark.slow  # two and four ranks are started for them

SHAPES = {
    "one": (1, 64),
    "odd": (7, 5),
    "wide": (9, 192),
    "conv": (5, 4, 2, 2),
    "tall": (70, 128),
    "bias": (3,),
    "parts": (64, 48),
}
STEPS = 4
PACKED = (
    "adamw_int4",
    "adamw_int8_root",
    "adamw_bf16",
    "lion_int8_root",
    "adamw_shared_in_int8",
    "adamw_shared_out_int8",
    "adafactor_momentum_int4",
    "foam_l1_int8",
    "muon_int8",
)
SPECS = tuple(spec for spec in NATIVE.values() if spec.storage == "fp32" or spec.name in PACKED)
CAST = ("adamw_int8+split8", "adamw+bf16_sr", "lion_int8+split8")


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Module()
    for name, shape in SHAPES.items():
        module.register_parameter(name, nn.Parameter(torch.randn(shape).to(dtype)))
    return module


def sharded(dtype: torch.dtype = torch.float32) -> nn.Module:
    module = network(dtype)
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return module


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def give(module: nn.Module, grads: Mapping[str, Tensor]) -> None:
    for name, param in module.named_parameters():
        grad = grads[name].to(param.dtype)
        cut = isinstance(param, DTensor)
        param.grad = distribute_tensor(grad, param.device_mesh, param.placements) if cut else grad.clone()


def specs_for(spec: Any, module: nn.Module, *, sharded: bool = False) -> dict[str, str]:
    """The spec where it applies (to sharded parameters), else AdamW."""
    found = {}
    for name, param in module.named_parameters():
        info = param_info(name, param, group=0)
        block = single_block(replace(info, whole=info.shape) if sharded else info)
        found[name] = spec.name if why_inapplicable(block, spec=spec, rule=RULE_INFOS[spec.rule]) is None else "adamw"
    return found


def stepped(optimizer: BlockwiseOptimizer, module: nn.Module, *, first: int = 0, steps: int = STEPS) -> None:
    for step in range(first, first + steps):
        give(module, gradients(step))
        optimizer.step()


def trained(spec: Any, backend: str, *, steps: int = STEPS) -> dict[str, Tensor]:
    module = sharded(torch.bfloat16 if "+" in getattr(spec, "name", spec) else torch.float32)
    specs = spec if isinstance(spec, str) else specs_for(spec, module)
    optimizer = BlockwiseOptimizer(module, specs, lr=1e-2, backend=backend)
    stepped(optimizer, module, steps=steps)
    assert backend in {choice.backend for choice in optimizer.registry.choices.values()}
    return optimizer.export_weights()


def all_specs(every: int) -> dict[str, dict[str, Tensor]]:
    """By the eager backend all of them, by the native one those that four ranks step, and others' weights."""
    taken = {"eager": [*SPECS[::every], *CAST], "native": [*SPECS[::5], *CAST]}
    return {
        f"{spec if isinstance(spec, str) else spec.name} {backend}": trained(spec, backend)
        for backend, specs in taken.items()
        for spec in specs
    }


def nonfinite(policy: str) -> dict[str, Any]:
    """A NaN in the last row of one tensor, of which one rank alone has a part."""
    module = sharded()
    optimizer = BlockwiseOptimizer(module, "lion", lr=1e-2, nonfinite=policy)
    grads = gradients(0)
    grads["tall"][-1, 3] = torch.nan
    give(module, grads)
    told = ""
    try:
        optimizer.step()
    except DivergedError as error:
        told = str(error)
    return {"told": told, "skipped": optimizer.num_skipped_steps, "weights": optimizer.export_weights()}


def clipped() -> dict[str, Tensor]:
    module = sharded()
    optimizer = BlockwiseOptimizer(module, "adamw_int8", lr=1e-2, nonfinite="skip_element")
    for step in range(STEPS):
        give(module, gradients(step))
        optimizer.mask_nonfinite()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert all(twin.grad is None for twin, _ in optimizer.registry.local_params.values())
    return optimizer.export_weights()


def layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 33), nn.Tanh(), nn.Linear(33, 3))


def really_trained(rank: int, size: int, *, replicas: int = 1) -> dict[str, Tensor]:
    """Forward and backward by fully_shard, each rank on its share of two micro-batches."""
    module = layers()
    sizes = (size,) if replicas == 1 else (replicas, size // replicas)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    for layer in module:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = BlockwiseOptimizer(
        module, {name: WEIGHTS_RUN.get(name, "adamw") for name, _ in module.named_parameters()}
    )
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        micro_batches = torch.randn(2, 8, 32, generator=generator)
        for index, micro_batch in enumerate(micro_batches):
            assert isinstance(module, FSDPModule)
            module.set_requires_gradient_sync(index == 1)
            (module(micro_batch[rank::size]).square().mean() / 2).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.export_weights()


WEIGHTS_RUN = {"0.weight": "adamw_int8", "2.weight": "foam_l1", "4.weight": "adamw_shared_in", "4.bias": "lion"}
SAVED = "muon_int8", "adamw_shared_in_int8", "adamw_int4", "adafactor_momentum", "foam_l1_int8", "lion_int8", "adamw"
HOSTED = "lion", "adamw_int8", "adafactor_momentum", "muon_int8"
SUMMED = "conv"  # by Adafactor, whose sums over ranks are rounded in their order
CONVERTED = (
    ("adamw_shared_out", "adamw"),
    ("adafactor_momentum", "adamw_int8"),
    ("adamw", "adafactor_momentum"),
    ("adamw_shared_in_int8", "adamw_shared_out_int8"),
)
MOVES = "lion", "adamw_shared_out", "adafactor_momentum_int8", "adamw_int8", "column_norm_momentum", "adamw"


def mixed(module: nn.Module) -> dict[str, str]:
    names = [name for name, _ in module.named_parameters()]
    specs = [specs_for(NATIVE[SAVED[index % len(SAVED)]], module) for index in range(len(names))]
    return {name: of[name] for name, of in zip(names, specs, strict=True)}


def built() -> tuple[nn.Module, BlockwiseOptimizer]:
    module = sharded()
    return module, BlockwiseOptimizer(module, mixed(module), lr=1e-2, rms_matching=False)


def saved(folder: Path) -> dict[str, Any]:
    """Steps, a checkpoint by torch.distributed.checkpoint and one whole state dict; then the steps that follow."""
    module, optimizer = built()
    stepped(optimizer, module)
    state = {"model": get_model_state_dict(module), "optimizer": get_optimizer_state_dict(module, optimizer)}
    save(state, checkpoint_id=folder / f"w{dist.get_world_size()}")
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = {
        "model": get_model_state_dict(module, options=whole),
        "optimizer": get_optimizer_state_dict(module, optimizer, options=whole),
    }
    if dist.get_rank() == 0:
        torch.save(full, folder / f"w{dist.get_world_size()}.pt")
    stepped(optimizer, module, first=STEPS)
    return {"weights": optimizer.export_weights(), "state": whole_state(optimizer)}


def resumed(folder: Path) -> dict[str, Any]:
    module, optimizer = built()
    state = {"model": get_model_state_dict(module), "optimizer": get_optimizer_state_dict(module, optimizer)}
    load(state, checkpoint_id=folder)
    set_model_state_dict(module, state["model"])
    set_optimizer_state_dict(module, optimizer, optim_state_dict=state["optimizer"])
    stepped(optimizer, module, first=STEPS)
    return {"weights": optimizer.export_weights(), "state": whole_state(optimizer)}


def from_one_file(path: Path) -> dict[str, Any]:
    module, optimizer = built()
    full = torch.load(path, weights_only=True)
    set_model_state_dict(module, full["model"], options=StateDictOptions(full_state_dict=True))
    optimizer.load_state_dict(full["optimizer"])
    stepped(optimizer, module, first=STEPS)
    return {"weights": optimizer.export_weights(), "state": whole_state(optimizer)}


def converted() -> dict[tuple[str, str], list[dict[Any, Tensor]]]:
    """Source and target -> what a one-device checkpoint became here and on one device, as torch's AdamW keeps it."""
    found = {}
    for source, target in CONVERTED:
        module = network()
        optimizer = BlockwiseOptimizer(module, specs_for(NATIVE[source], module), lr=1e-2, rms_matching=False)
        stepped(optimizer, module)
        state = optimizer.state_dict()
        outs = []
        for each in (sharded(), network()):
            loaded = BlockwiseOptimizer(each, specs_for(NATIVE[target], each), lr=1e-2, rms_matching=False)
            loaded.load_state_dict(state)
            assert not any(live.unseeded for live in loaded.registry.live.values())
            states = loaded.to_adamw_state_dict()["state"].items()
            outs.append({(index, key): value for index, state in states for key, value in state.items()})
        found[source, target] = outs
    return found


def whole_state(optimizer: BlockwiseOptimizer) -> dict[Any, Tensor]:
    states = optimizer.state_dict()["state"].items()
    return {(index, key): unsharded(value).clone() for index, state in states for key, value in state.items()}


def moved() -> dict[str, Tensor]:
    """From spec to spec, by column and not, where a rank has no rows of some matrices."""
    module = sharded()
    optimizer = BlockwiseOptimizer(module, specs_for(NATIVE[MOVES[0]], module), lr=1e-2)
    for index, name in enumerate(MOVES):
        optimizer.migrate(specs_for(NATIVE[name], module))
        known = {"adafactor_momentum_int8", "adamw_int8"}  # by v of another shape before
        assert name not in known or not any(live.unseeded for live in optimizer.registry.live.values())
        stepped(optimizer, module, first=2 * index, steps=2)
    return optimizer.export_weights()


def hosted(every: int) -> dict[str, bool]:
    """Spec and backend -> whether states that stream from the host make the same weights as those on the device."""
    found = {}
    for name in HOSTED[::every]:
        for backend in ("eager", "native"):
            weights = []
            for suffix in ("", "@streamed"):
                module = sharded()
                specs = {key: spec + suffix for key, spec in specs_for(NATIVE[name], module).items()}
                with rings():
                    optimizer = BlockwiseOptimizer(module, specs, lr=1e-2, backend=backend)
                stepped(optimizer, module, steps=3)
                weights.append(optimizer.export_weights())
            found[f"{name} {backend}"] = all(map(torch.equal, weights[0].values(), weights[1].values()))
    return found


def planned() -> dict[str, Any]:
    """A plan of a share of state, and the bytes that come of it here."""
    module = layers()
    fully_shard(module)
    optimizer = BaocOptimizer(module, budget="state_50", verbose=False)
    held = sum(optimizer.block_state_bytes().values())
    inside = BaocOptimizer(module, budget="110kb", verbose=False, probe=lambda: module(torch.ones(2, 32)).sum())
    states = sum(inside.block_state_bytes().values())
    first, rest = list(module[0].parameters()), module[2:].parameters()
    given = {"model": module, "budget": "110kb", "probe": lambda: module(torch.ones(2, 32)).sum(), "verbose": False}
    late = BaocOptimizer(first, **given)
    before = sum(late.block_state_bytes().values())
    late.add_param_group({"params": rest})
    added = sum(late.block_state_bytes().values()) - before
    return {
        "specs": optimizer.specs,
        "bytes": optimizer.plan.allocation.state_bytes,
        "held": held,
        "late": (late.reallocator.late_bytes, added),
        "inside": (inside.specs, inside.plan.allocation.state_bytes, states, inside.plan.peak_bytes),
    }


def profiled(module: nn.Module, *, max_bytes: int | None = None) -> GradientProfiler:
    """What is known after some gradients; within few bytes, of bands of rows."""
    named = dict(module.named_parameters())
    blocks = [single_block(param_info(name, param, group=0)) for name, param in named.items()]
    profiler = GradientProfiler(blocks, named, max_bytes=max_bytes)
    for step in range(STEPS):
        give(module, gradients(step))
        profiler.observe(step=step)
    return profiler


def work(rank: int, size: int, store: Path, *, folder: Path, source: int) -> dict[str, Any]:
    with group(rank, size, store=store):
        found: dict[str, Any] = {"weights": all_specs(5 if size == 4 else 1), "clipped": clipped()}
        found["trained"] = really_trained(rank, size)
        found["replicas"] = really_trained(rank, size, replicas=2) if size == 4 else found["trained"]
        found["planned"] = planned()
        found["moved"] = moved()
        found["hosted"] = hosted(2 if size == 4 else 1)
        bands = profiled(sharded(), max_bytes=60_000)
        found["profiled"] = (profiled(sharded()).profile().stats, bands.profile().stats)
        found |= {policy: nonfinite(policy) for policy in POLICIES}
        found["converted"] = converted()
        found["saved"] = saved(folder)
        if source:
            found["resumed"] = resumed(folder / f"w{source}")
            found["file"] = from_one_file(folder / f"w{source}.pt")
        return found


def test_no_rank_waits_for_others_while_a_profiler_is_built_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One alone may run out of memory there, and the others would wait for its part of a sum."""
    summed: list[int] = []
    all_reduce_ = ShardGroup.all_reduce_
    monkeypatch.setattr("baoc.profiling.schedule.LARGE_PARAMS", 0)  # so that it is rehearsed
    monkeypatch.setattr(ShardGroup, "all_reduce_", lambda self, grad: summed.append(1) or all_reduce_(self, grad))
    with group(0, 1, store=tmp_path / "store"):
        module = sharded()
        named = dict(module.named_parameters())
        blocks = [single_block(param_info(name, param, group=0)) for name, param in named.items()]
        profiler = GradientProfiler(blocks, named, max_share=1e9)
        assert profiler.temporary_bytes() > 0 and not summed
        give(module, gradients(0))
        assert not profiler.observe(step=0) and not summed
        profiler.observe(step=1)
        assert summed == [1]


def test_a_part_that_moved_is_stepped_where_it_is_from_the_next_step_on(tmp_path: Path) -> None:
    with group(0, 1, store=tmp_path / "store"):
        module = sharded()
        optimizer = BlockwiseOptimizer(module, "adamw", lr=1e-2)
        stepped(optimizer, module, steps=2)
        part = local_shard(next(module.parameters()))
        part.data = part.data.clone()
        before = part.clone()
        stepped(optimizer, module, first=2, steps=1)
        assert not torch.equal(part, before)


FUSED = ("lion", "foam_l1", "muon_int8")  # matched, by element, by row and by matrix


def interpreted(rank: int, size: int, store: Path) -> dict[str, Any]:
    assert INTERPRETING
    found: dict[str, Any] = {}
    with group(rank, size, store=store):
        for spec in FUSED:
            steps = 1 if spec.startswith("muon") else 2  # states are read again by the others
            found[spec] = [trained(NATIVE[spec], backend, steps=steps) for backend in ("fused", "eager")]
    return found


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return in_processes(partial(work, folder=folder, source=0), size=2)


@pytest.fixture(scope="module")
def four(folder: Path, two: Any) -> list[dict[str, Any]]:
    return in_processes(partial(work, folder=folder, source=2), size=4)


@pytest.fixture(scope="module")
def alone(folder: Path, four: Any) -> dict[str, Any]:
    return work(0, 1, folder / "store", folder=folder, source=4)


@pytest.fixture(scope="module")
def ranks(two: list[dict[str, Any]], four: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [*two, *four]


def test_equal_gradients_make_the_same_weights_at_any_number_of_ranks(alone: Any, ranks: list[Any]) -> None:
    """Bit for bit, but for the sums of rules and of matching over a tensor, and the lanes that round 16-bit weights in
    rows of other than a multiple of 32."""
    for run, expected in alone["weights"].items():
        spec = NATIVE.get(run.split()[0])
        for name, value in expected.items():
            for found in [each["weights"][run][name] for each in ranks if run in each["weights"]]:
                if spec is None and value[0].numel() % 32:
                    assert torch.allclose(found, value, rtol=0, atol=2e-4 if "sr" not in run else 0), (run, name)
                elif spec is not None and (RULE_INFOS[spec.rule].matched or sums_columns(RULE_INFOS[spec.rule])):
                    assert torch.allclose(found, value, rtol=1e-6, atol=1e-6), (run, name)
                else:
                    assert torch.equal(found, value), (run, name)


def test_one_rank_steps_as_an_unsharded_optimizer_where_rows_hold_whole_groups(alone: Any) -> None:
    for spec in SPECS:
        module = network()
        optimizer = BlockwiseOptimizer(module, specs_for(spec, module, sharded=True), lr=1e-2, backend="eager")
        stepped(optimizer, module)
        for name in ("wide", "tall") if spec.name in ("adamw_int4", "foam_l1_int8") else ("wide", "tall", "parts"):
            found, expected = optimizer.export_weights()[name], alone["weights"][f"{spec.name} eager"][name]
            summed = spec.rule == "muon" or sums_columns(RULE_INFOS[spec.rule])
            assert torch.equal(found, expected) or (summed and torch.allclose(found, expected)), spec


def test_kernels_share_the_sums_of_matching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # counts as Triton is imported
    start = network().state_dict()
    for each in in_processes(interpreted, fresh=not (INTERPRETING and forked_from_here())):
        for spec, (fused, eager) in each.items():
            for name, value in eager.items():
                difference = (fused[name] - value).norm() / (value - start[name]).norm()
                assert difference < (3e-2 if spec.startswith("muon") else 1e-4), (spec, name, difference)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_ranks_nan_is_one_of_all(policy: str, alone: Any, ranks: list[Any]) -> None:
    for each in ranks:
        found, expected = each[policy], alone[policy]
        assert found["skipped"] == expected["skipped"] == (policy == "skip_step")
        assert bool(found["told"]) == bool(expected["told"]) == (policy == "raise")
        for name, value in expected["weights"].items():
            assert torch.allclose(found["weights"][name], value, rtol=1e-6, atol=1e-6)
            assert policy == "skip_element" or torch.equal(value, network().get_parameter(name))


def test_the_plan_is_that_of_any_number_of_ranks_and_each_holds_its_part(alone: Any, ranks: list[Any]) -> None:
    expected = alone["planned"]
    assert expected["held"] == expected["bytes"]
    for each in ranks:
        assert each["planned"]["specs"] == expected["specs"]
        assert each["planned"]["bytes"] == expected["bytes"] > each["planned"]["held"]


def test_statistics_of_gradients_are_those_of_one_device(alone: Any, ranks: list[Any]) -> None:
    assert len(alone["profiled"][0]) == len(SHAPES)
    for each in ranks:
        assert str(each["profiled"]) == str(alone["profiled"])  # NaN where a vector has none
    assert str(alone["profiled"][0]) == str(profiled(network()).profile().stats)


def test_states_on_the_host_make_the_same_weights(ranks: list[Any]) -> None:
    for each in ranks:
        assert each["hosted"] and all(each["hosted"].values()), each["hosted"]


def test_a_group_of_a_codec_never_lies_on_two_ranks() -> None:
    def cut(shape: tuple[int, ...], ranks: int) -> Any:
        return SimpleNamespace(param=torch.empty(shape, device="meta"), group=SimpleNamespace(size=ranks))

    info = ParamInfo(name="w", shape=(2048, 5461), dtype="float32", role=Role.MLP, whole=(2048, 5461))
    m = next(state for state in RULE_INFOS["adamw"].states if state.name == "m")
    assert STORAGES["int8"].codec(m, param=info) == "softsign8"
    assert STORAGES["int8"].codec(m, param=replace(info, shape=(2047, 5461), whole=(2047, 5461))) == "fp32"
    states = {"m": (info.numel, 32)}
    for size in (1, 2, 4, 8, 16, 32):
        check_codec_groups(info, states=states, shard=cut(info.shape, size), spec="adamw_int8")
    with pytest.raises(
        BadInputError, match="divides 32"
    ):  # 64 rows are 32 groups, but not of the 32 parts of a checkpoint
        check_codec_groups(info, states={"m": (192 * 16, 32)}, shard=cut((192, 64), 3), spec="foam_l2_int8")
    with pytest.raises(
        BadInputError, match=r"w of shape \(2048, 5461\) cannot run adamw_int8 on 3 ranks: .* divides 32"
    ):
        check_codec_groups(info, states=states, shard=cut(info.shape, 3), spec="adamw_int8")


def test_states_on_the_host_are_shown_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a mesh of another device (here it is one in name only) they would fill that before anything is written."""
    with group(0, 1, store=tmp_path / "store"):
        module = sharded()
        with rings():
            optimizer = BlockwiseOptimizer(module, "adamw@streamed")
        stepped(optimizer, module, steps=1)
        here = whole_state(optimizer)
        monkeypatch.setattr(DeviceMesh, "device_type", property(lambda _: "meta"))
        states = optimizer.state_dict()["state"]
        monkeypatch.undo()
        assert all(value.device.type == "cpu" for state in states.values() for value in state.values())
        kept = {tensor.data_ptr() for state in optimizer.registry.state.values() for tensor in state.values()}
        shown = {value.to_local().data_ptr() for state in states.values() for value in (state["m"], state["v"])}
        assert shown <= kept
        for (index, key), value in here.items():
            assert torch.equal(unsharded(states[index][key]), value)


def test_a_step_that_sums_over_ranks_takes_the_room_that_is_predicted(tmp_path: Path) -> None:
    def probe() -> Any:
        mesh = init_device_mesh("cpu", (1,))
        param = nn.Parameter(distribute_tensor(torch.ones(512, 512), mesh, [Shard(0)]))
        param.grad = distribute_tensor(torch.randn(512, 512), mesh, [Shard(0)])
        return BlockwiseOptimizer([param], spec, backend="eager").step

    with group(0, 1, store=tmp_path / "store"):
        for spec in (spec for spec in NATIVE.values() if sums_columns(RULE_INFOS[spec.rule])):
            found = step_temporary_bytes(probe, device="cpu")
            told = step_temporaries([spec], params=[torch.empty(512, 512)])[spec.name]
            assert found <= 1.02 * told, (spec.name, found / 512**2, told / 512**2)


def test_a_budget_of_memory_is_that_of_the_rank_which_has_most(alone: Any, two: list[Any], four: list[Any]) -> None:
    for found in ([alone], two, four):
        (specs, states, held, peak), *others = (each["planned"]["inside"] for each in found)
        assert held == states and peak <= 110_000
        assert all(other[0] == specs and other[2] <= held for other in others)
        (counted, added), *others = (each["planned"]["late"] for each in found)
        assert counted == added and all(other[0] == counted and other[1] <= added for other in others)


@pytest.mark.parametrize("run", ["clipped", "trained", "replicas", "moved"])
def test_clipping_by_norm_accumulation_and_moves(run: str, alone: Any, ranks: list[Any]) -> None:
    for each in ranks:
        for name, value in alone[run].items():
            assert torch.allclose(each[run][name], value, rtol=1e-5, atol=2e-6), name


@pytest.mark.parametrize("door", ["resumed", "file"])
def test_a_checkpoint_is_read_at_another_number_of_ranks(door: str, alone: Any, four: list[Any]) -> None:
    """2 -> 4 -> 1, by torch.distributed.checkpoint and as one file: what follows is bit for bit what would have, but
    for sums over ranks."""
    summed = {SUMMED, *((list(SHAPES).index(SUMMED), key) for key in ("m", "v_row", "v_col", "step"))}
    for each in (*four, alone):
        for what, expected in alone["saved"].items():
            found = each[door][what]
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                alike = (
                    torch.allclose(found[name], value, rtol=1e-6) if name in summed else torch.equal(found[name], value)
                )
                assert value.dtype is found[name].dtype and alike, (what, name)


def test_a_checkpoint_of_one_device_keeps_v_where_it_takes_all_rows(alone: Any, ranks: list[Any]) -> None:
    for each in (*ranks, alone):
        for moved, (cut, plain) in each["converted"].items():
            assert cut.keys() == plain.keys(), moved
            for key, value in plain.items():
                off = float((cut[key] - value).norm() / value.norm())  # codes of 8 bits where rows hold whole groups
                assert off < (0.02 if "int8" in moved[1] else 1e-5), (moved, key, off)
