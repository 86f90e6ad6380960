"""Parameters that come to their device as their specs keep them: the same bits, and never all of them in full."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from baoc.errors import BadInputError
from baoc.optim import weights
from baoc.optim.registry import BlockRegistry
from baoc.profiling import MemoryTracker
from baoc.types import Footprint
from tests.support.optimizing import build, make_params, state_tensors, values

ELSEWHERE = torch.device("cpu:0")  # no tensor says that it is there, so all come
SHAPES = {"conv": (8, 3, 3, 5), "odd": (9, 37), "one": (1,), "v257": (257,), "empty": (0,), "large": (65, 67)}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "ELEMENTS_PER_PIECE", 100)


def params(dtype: torch.dtype) -> dict[str, Tensor]:
    made = make_params(SHAPES, dtype=dtype)
    made["conv"].data = made["conv"].data.to(memory_format=torch.channels_last)
    made["odd"].data = made["odd"].data.t().contiguous().t()
    return made


@pytest.mark.filterwarnings("ignore:16-bit weights without correction")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", ["adamw", "adamw_int8+split8", "sign+bf16", "sign+bf16_sr"])
def test_what_comes_is_bit_for_bit_what_is_narrowed_there(
    spec: str, dtype: torch.dtype, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, coming = params(dtype), params(dtype)
    strides = {name: param.stride() for name, param in there.items()}
    came = build(coming, spec, device=ELSEWHERE)
    monkeypatch.setattr(weights, "ELEMENTS_PER_PIECE", 2**30)
    whole = build(there, spec)
    for a, b in ((values(there), values(coming)), (state_tensors(whole), state_tensors(came))):
        assert a.keys() == b.keys()
        assert all(a[name].dtype is b[name].dtype and torch.equal(a[name], b[name]) for name in a)
    assert {name: param.stride() for name, param in coming.items()} == strides
    assert {p.dtype for p in coming.values()} == {torch.bfloat16 if "+" in spec else dtype}
    for name, value in whole.export_weights().items():
        assert torch.equal(value, came.export_weights()[name]), name


def test_a_gradient_goes_along_and_a_tied_weight_comes_once(small_pieces: None) -> None:
    net = nn.ModuleDict({"embedding": nn.Embedding(20, 16), "head": nn.Linear(16, 20, bias=False)})
    net["head"].weight = net["embedding"].weight
    net["head"].weight.grad = torch.ones(20, 16)
    optimizer = build(dict(net.named_parameters()), "adamw_int8+split8", device=ELSEWHERE)
    assert net["head"].weight is net["embedding"].weight and net["head"].weight.grad.dtype is torch.bfloat16
    assert len(optimizer.state) == 1


@pytest.mark.parametrize("spec", ["adamw_int8+split8", "sign+bf16_sr", "adamw_int8+split8@streamed"])
def test_blocks_come_one_by_one_and_a_piece_at_a_time(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host and device are one here: what is there is the whole weights that still wait, and what was taken in."""
    monkeypatch.setattr(weights, "ELEMENTS_PER_PIECE", 4096)
    made = make_params({name: (256, 256) for name in "abcd"})
    waiting: list[list[torch.dtype]] = []
    enlist = BlockRegistry.add_block

    def watched(registry: BlockRegistry, live: Any, **given: Any) -> None:
        waiting.append([param.dtype for param in made.values()])
        enlist(registry, live, **given)

    monkeypatch.setattr(BlockRegistry, "add_block", watched)
    with MemoryTracker().count_existing(made) as tracker:
        before = tracker.current_bytes
        optimizer = build(made, spec, device=ELSEWHERE)
        peak = tracker.peak_bytes
    assert waiting == [[torch.bfloat16] * done + [torch.float32] * (4 - done) for done in range(4)]
    numel, host = 256**2, optimizer.block_host_bytes()["a"]
    held = 2 * numel + optimizer.block_state_bytes()["a"]
    if "@" in spec:  # the arena is there from the beginning, and nowhere else a state
        held, before = 2 * numel, before + 4 * host
    least = before + held + 3 * max(0, held - 4 * numel)
    assert least - 2**10 < peak <= least + 24 * 4096
    spec_of_a = optimizer.registry.live["a"].spec
    assert weights.conversion_bytes([spec_of_a], device="cuda:0") == weights.CONVERSION_BYTES
    assert weights.conversion_bytes([spec_of_a], device="cpu") == 0


def test_a_plan_has_room_for_what_comes() -> None:
    """Where a step needs hardly more than the weights, taking them in is the largest moment, less what is not kept."""
    bytes_of: dict[str, Any] = {
        "weights_bytes": 1000,
        "gradients_bytes": 10,
        "forward_backward_bytes": 1100,
        "resident_bytes": 1010,
    }
    footprint = Footprint(device="cuda:0", micro_batch=1, validation_bytes=0, arrival_bytes=200, **bytes_of)
    assert footprint.peak_bytes(state_bytes=30) == 1000 + 200 + 30
    assert footprint.peak_bytes(state_bytes=30, saved={"a": 400}) == 600 + 200 + 30
    assert replace(footprint, arrival_bytes=0).peak_bytes(state_bytes=30) == 1100 + 30


def test_rounding_at_random_of_parts_is_that_of_the_whole() -> None:
    values, whole, parts = torch.randn(1000), torch.empty(1000).bfloat16(), torch.empty(1000).bfloat16()
    weights.round_at_random_(whole, values=values, seed=3, phase=2)
    for first in (0, 300, 900):
        part = slice(first, {0: 300, 300: 900, 900: 1000}[first])
        weights.round_at_random_(parts[part], values=values[part], seed=3, phase=2, first=first)
    assert torch.equal(whole, parts) and not torch.equal(whole, values.bfloat16())


class _Sums(TorchDispatchMode):
    """Elements that were added up at a time, which torch casts first."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.sum:
            self.numels.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_weights_are_told_apart_by_parts_wherever_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "ELEMENTS_PER_CHECKSUM", 100)
    one = torch.randn(41, 24).bfloat16()
    with _Sums() as sums:
        known = weights.checksum(one)
    assert max(sums.numels) == 100 and sum(sums.numels) == one.numel()
    room = torch.zeros(3 + one.numel()).bfloat16()
    elsewhere = room[3:].view(41, 24).copy_(one)
    turned = one.t().contiguous().t()
    assert [weights.checksum(same) for same in (elsewhere, turned)] == [known, known]
    one[40, 23] += 1
    assert weights.checksum(one) != known
    assert (
        weights.checksum(torch.zeros((), dtype=torch.bfloat16)) == weights.checksum(torch.zeros(0, 3).bfloat16()) == 0
    )


@pytest.mark.parametrize("by_data", [True, False])
def test_weights_that_no_version_tells_of_are_not_corrected_by_those_before(by_data: bool) -> None:
    net = nn.Linear(5, 3)
    optimizer = build(dict(net.named_parameters()), "adamw+split8")
    if by_data:
        net.weight.data.copy_(torch.ones(3, 5))
    else:  # a copy of a parameter begins with version 0
        (slot,) = (s for live in optimizer.registry.live.values() for s in live.slots if s.param is net.weight)
        net, optimizer = copy.deepcopy((net, optimizer))
        with torch.no_grad():
            for _ in range(slot.param._version):
                net.weight.fill_(1.0)
    exact = optimizer.export_weights()
    assert torch.equal(exact["weight"], torch.ones(3, 5)) and not torch.equal(exact["bias"], net.bias.float())


def test_a_checkpoint_without_corrections_leaves_those_of_weights_that_nobody_changed() -> None:
    net = nn.Linear(5, 3)
    optimizer = build(dict(net.named_parameters()), "adamw+split8")
    exact = optimizer.export_weights()
    net.weight.data.fill_(1.0)
    net.bias.data.copy_(exact["bias"])
    saved = torch.optim.AdamW(net.named_parameters())
    net.weight.grad, net.bias.grad = torch.ones_like(net.weight), torch.ones_like(net.bias)
    saved.param_groups[0] |= {"lr": 0.0}
    saved.step()
    optimizer.load_state_dict(saved.state_dict())
    assert torch.equal(optimizer.export_weights()["weight"], torch.ones(3, 5))
    assert torch.equal(optimizer.export_weights()["bias"], exact["bias"])


@pytest.mark.parametrize("first", ["adamw", "lion+split8"])
def test_moves_before_the_first_step_see_weights_that_came_before_and_after(first: str) -> None:
    net = nn.Linear(5, 3)
    optimizer = build(dict(net.named_parameters()), "adamw+split8")
    exact = optimizer.export_weights()
    for value, spec in ((1.0, first), (2.0, "adamw+split8"), (3.0, "sign+split8")):
        net.load_state_dict({"weight": torch.full((3, 5), value), "bias": net.bias.detach()})
        optimizer.migrate(dict.fromkeys(optimizer.specs, spec))
        now = optimizer.export_weights()
        assert torch.equal(now["weight"], torch.full((3, 5), value))
        torch.testing.assert_close(now["bias"], exact["bias"], rtol=2e-5, atol=0)
    optimizer.load_weights({"weight": torch.full((3, 5), 1.01)})  # of which bf16 and 8 bits hold 16
    torch.testing.assert_close(optimizer.export_weights()["weight"], torch.full((3, 5), 1.01), rtol=2e-5, atol=0)
    net.weight.data.fill_(4.0)
    assert torch.equal(optimizer.export_weights()["weight"], torch.full((3, 5), 4.0))


def test_a_number_that_was_cast_is_refused_as_any_parameter_and_cast_back_is_as_it_was() -> None:
    net = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(1.01))})
    optimizer = build(dict(net.named_parameters()), "adamw+split8")
    exact = optimizer.export_weights()["scale"]
    net.float()
    net["scale"].grad = torch.tensor(1.0)
    with pytest.raises(BadInputError, match=r"scale is torch.float32 now, and its block keeps split8 weights"):
        optimizer.step()
    net["scale"].grad = None
    net.bfloat16()
    optimizer.mask_nonfinite()
    assert torch.equal(optimizer.export_weights()["scale"], exact) and exact != net["scale"]
