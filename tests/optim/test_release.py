"""Gradient release: the step that was taken in backward is the step, bit for bit, and what cannot be is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from baoc.core.catalogue import NATIVE
from baoc.errors import BadInputError, TrainingFailedError
from baoc.optim import BlockwiseOptimizer, GradientRelease
from baoc.optim import backward as stepping
from baoc.optim.backward import ordered_after
from baoc.planning.cost import stepping_groups
from baoc.profiling.tracker import MemoryTracker
from tests.support.optimizing import MATRICES, info, one_block, shapes_for
from tests.support.releasing import Pair, assert_equal, backward

WEIGHTS = ("adamw+split8", "adamw_int8+split8", "lion_int8+split8", "foam_l2+split8",
           "adamw_bf16+bf16_sr", "sign+bf16_sr", "rmsprop+bf16", "adafactor+split8")  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:16-bit weights without correction")


@pytest.mark.parametrize("spec", [*NATIVE, *WEIGHTS])
def test_a_released_step_is_the_step_bit_for_bit(spec: str) -> None:
    pair = Pair(spec, shapes_for(spec.partition("+")[0]), backend="eager", lr=1e-2)
    before = {name: param.detach().clone() for name, param in pair.twins.items()}
    for _ in range(4):
        pair.step()
        assert all(param.grad is None for param in pair.twins.values())
    pair.check()
    assert not any(torch.equal(before[n].to(p.dtype), p) for n, p in pair.twins.items() if p.numel())


class Net(nn.Module):
    """Embedding and head are one tensor, `second` is used only when asked for, `unused` never."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.first, self.second = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor, *, second: bool = True) -> Tensor:
        hidden = torch.relu(self.first(self.embed(tokens)))
        hidden = self.second(hidden) if second else hidden
        return nn.functional.cross_entropy(self.head(self.norm(hidden)), tokens.roll(1))


TOKENS = torch.arange(22) % 11


def pair_of_nets(specs: object = "adamw_int8", **settings: object) -> tuple[list[Net], list[BlockwiseOptimizer]]:
    nets = [Net(), Net()]
    released = {"release": True, **settings}
    kept = {key: value for key, value in settings.items() if key != "release"}
    return nets, [BlockwiseOptimizer(nets[0], specs, **kept), BlockwiseOptimizer(nets[1], specs, **released)]  # pyright: ignore


def same(nets: list[Net], optimizers: list[BlockwiseOptimizer]) -> None:
    assert_equal(optimizers[0], dict(nets[0].named_parameters()), optimizers[1], dict(nets[1].named_parameters()))


def test_blocks_are_put_together_up_to_a_limit_beside_what_was_there():
    order = [("a", 10), ("b", 4), ("c", 4), ("d", 10), ("e", 2), ("f", 2)]
    left = dict.fromkeys("abcdef", 1)

    def groups(limit: int, *, apart: str = "") -> list[str]:
        found = stepping_groups(order, num_gradients=left, limit=limit, joins=lambda a, b: not {a, b} & set(apart))
        return ["".join(group) for group in found]

    assert groups(100) == ["abcdef"] and groups(14) == ["ab", "cd", "ef"] and groups(1) == list("abcdef")
    assert groups(10) == ["a", "bc", "d", "ef"] and groups(10, apart="e") == ["a", "bc", "d", "e", "f"]
    late = [("e", 7), ("f", 7), ("a", 30), ("b", 10), ("c", 10)]
    found = stepping_groups(late, num_gradients=left, limit=20, joins=lambda a, b: True)
    assert found == [("e", "f"), ("a",), ("b", "c")]
    found = stepping_groups(late, num_gradients=left, limit=10, joins=lambda a, b: True)
    assert found == [("e",), ("f",), ("a",), ("b",), ("c",)]


@pytest.mark.parametrize(
    ("order", "limit", "apart", "groups"),
    [
        ("", 9, "", ""),
        ("a5 b3 a5", 9, "", "b a"),  # b would be there beside all of a
        ("d8 c8 b3 c2", 13, "", "d bc"),  # the peak up to c is 16, with what d leaves
        ("a8 d2 c1 b1 a4", 6, "a", "d cb a"),  # beside what is there of a
        ("a1 d4 b7", 11, "a", "a db"),
        ("d8 b2", 14, "b", "d b"),
        ("b4 c9 b6 a3", 9, "", "c b a"),  # both parts of b are over the limit
    ],
)
def test_gradients_that_come_by_parts_wait_beside_the_peak_up_to_there(order: str, limit: int, apart: str, groups: str):
    came = [(part[0], int(part[1:])) for part in order.split()]
    left = {name: sum(other == name for other, _ in came) for name, _ in came}
    found = stepping_groups(came, num_gradients=left, limit=limit, joins=lambda a, b: not {a, b} & set(apart))
    assert ["".join(group) for group in found] == groups.split()


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=20),
    limit=st.integers(0, 200),
    data=st.data(),
)
def test_grouped_blocks_hold_at_most_the_limit_beside_the_most_that_was_there_by_then(
    sizes: list[int], limit: int, data: st.DataObject
) -> None:
    """As a plan charges it, whatever the order in which gradients come."""
    blocks = [data.draw(st.integers(0, max(0, len(sizes) // 2))) for _ in sizes]
    order = [(str(block), size) for block, size in zip(blocks, sizes, strict=True)]
    left = {name: sum(other == name for other, _ in order) for name, _ in order}
    groups = stepping_groups(order, num_gradients=left, limit=limit, joins=lambda a, b: True)
    assert sorted(name for group in groups for name in group) == sorted(left)
    group_of = {name: group for group in groups for name in group}
    missing, held, alone, most = dict(left), dict.fromkeys(left, 0), dict.fromkeys(left, 0), 0
    whole: list[str] = []
    for name, size in order:
        held[name], alone[name], missing[name] = held[name] + size, alone[name] + size, missing[name] - 1
        most = max(most, sum(alone.values()))
        assert sum(held.values()) <= most + limit
        if missing[name]:
            continue
        alone[name] = 0
        if whole and group_of[whole[0]] != group_of[name]:
            held |= dict.fromkeys(whole, 0)
            whole = []
        whole.append(name)
        if len(whole) == len(group_of[name]):
            held |= dict.fromkeys(whole, 0)
            whole = []


@pytest.mark.parametrize(("limit", "largest"), [(0, 1), (300, 3), (10**6, 5)])
def test_a_network_with_tied_and_idle_parameters_trains_alike_and_its_tied_one_is_stepped_once(
    limit: int, largest: int
) -> None:
    """Alone, or blocks together up to so many bytes of gradients, as on a GPU; a block may stay away."""
    nets, optimizers = pair_of_nets(lr=1e-2)
    assert optimizers[1].releaser is not None and optimizers[1].releaser.group_bytes_limit == 0
    optimizers[1].releaser.group_bytes_limit = limit
    for step in range(6):
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            net(TOKENS, second=step in (2, 3)).backward()
            if net is nets[1]:
                with pytest.raises(BadInputError, match=r"zero_grad\(\) was called between"):
                    optimizer.zero_grad()
            optimizer.step()
            assert net is nets[0] or all(p.grad is None for p in net.parameters())
    same(nets, optimizers)
    steps = {name: optimizers[1].state[param]["step"].item() for name, param in nets[1].named_parameters()}
    assert steps["embed.weight"] == 6 and steps["second.weight"] == 2 and steps["unused"] == 0
    assert max(map(len, optimizers[1].registry.step_groups.values()), default=1) == largest


@pytest.mark.parametrize("spec", ["adamw", "lion_int8", "foam_l2", "adafactor"])
@pytest.mark.parametrize("half", [False, True])
def test_groups_do_not_gather_gradients_while_they_wait_for_what_does_not_come(spec: str, half: bool) -> None:
    """Every group misses a block from the third step on (or half of its parameters), as of skipped or frozen layers;
    the last step brings all in another order, so that groups are stepped in two parts."""
    shapes = {**{f"{part}{i}": (8, 8) for i in range(6) for part in "abc"}, "z": (64, 64)}
    blocks = [one_block("z", [info("z", shapes["z"])])]
    for i in range(6):
        blocks.append(one_block(f"a{i}", [info(f"a{i}", (8, 8))]))
        blocks.append(one_block(f"bc{i}", [info(f"b{i}", (8, 8)), info(f"c{i}", (8, 8))]))
    pair = Pair(spec, shapes, blocks=blocks, lr=1e-2)
    releaser = pair.released.releaser
    assert releaser is not None
    releaser.group_bytes_limit, held = 3 * 8 * 8 * 4, [0]

    def note(_: Tensor) -> None:
        held.append(sum(p.grad.nbytes for n, p in pair.twins.items() if p.grad is not None and n[0] in "ac"))

    for param in pair.twins.values():
        param.register_post_accumulate_grad_hook(note)
    for step in range(6):
        grads = pair.gradients.next()
        missing = ("b" if half else "bc") if 1 < step < 5 else ""
        kept = [name for name in grads if name[0] not in missing]
        pair.step({name: grads[name] for name in (sorted(kept) if step == 5 else kept)})
        assert step or all(len(group) == 2 for name, group in pair.released.registry.step_groups.items() if name != "z")
        if not half and step < 5:
            assert max(held) <= 3 * 8 * 8 * 4, f"step {step}"
    pair.check()


@pytest.mark.parametrize("spec", ["adamw", "lion_int8", "foam_l2", "adafactor"])
def test_a_block_is_stepped_when_its_last_gradient_is_there(spec: str) -> None:
    """Matching needs all of a block, and a part of the network may leave some of it without gradient."""
    shapes = {"a": (8, 64), "b": (6, 10), "c": (5, 7), "d": (4, 4)}
    blocks = [one_block(name, [info(n, shapes[n]) for n in name]) for name in ("ab", "cd")]
    pair = Pair(spec, shapes, blocks=blocks, lr=1e-2)
    for step in range(5):
        grads = pair.gradients.next()
        pair.step({name: grad for name, grad in grads.items() if step != 2 or name in "acd"})
    pair.check()


def test_gradients_go_block_by_block_and_what_waits_is_stepped_in_step() -> None:
    shapes = {"a": (4,), "b": (4,), "c": (4,)}
    blocks = [one_block("ab", [info("a", (4,)), info("b", (4,))]), one_block("c", [info("c", (4,))])]
    pair = Pair("adamw", shapes, blocks=blocks)
    twins, before = pair.twins, pair.twins["a"].detach().clone()
    backward(twins, {"a": torch.ones(4), "c": torch.ones(4)})
    assert twins["a"].grad is not None and torch.equal(twins["a"], before), "b of its block may still come"
    assert twins["c"].grad is None
    pair.released.step()
    assert twins["a"].grad is None and not torch.equal(twins["a"], before)


@pytest.mark.slow
def test_a_compiled_network_trains_alike() -> None:
    nets, optimizers = pair_of_nets(lr=1e-2)
    for net, optimizer in zip(nets, optimizers, strict=True):
        compiled = torch.compile(net, backend="aot_eager")
        for _ in range(3):
            optimizer.zero_grad()
            compiled(TOKENS).backward()
            optimizer.step()
    same(nets, optimizers)


# -- memory --------------------------------------------------------------------------------------------------------


def test_gradients_of_one_block_are_alive_at_once_where_all_were() -> None:
    """Eight layers of 64 x 64 in fp32 are 128 KiB of gradients; the largest block of them is one of 16."""
    peaks = []
    for release in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])
        optimizer = BlockwiseOptimizer(model, "sign", release=release, rms_matching=False)
        tracker = MemoryTracker(device="cpu").count_existing(model, optimizer.state)
        x = torch.randn(2, 64)
        for _ in range(2):
            optimizer.zero_grad()
            with tracker:
                tracker.reset_peak()
                model(x).square().mean().backward()
                optimizer.step()
        peaks.append(tracker.peak_bytes)
    kept, released = peaks
    layer = 64 * 64 * 4
    assert kept >= 16 * layer, "weights and gradients"
    assert kept - released >= 5 * layer, "seven gradients less, up to two for what the step holds meanwhile"


# -- what a step is ------------------------------------------------------------------------------------------------


def test_a_closure_runs_once_with_gradients_and_its_loss_comes_back() -> None:
    nets, optimizers = pair_of_nets()
    for net, optimizer in zip(nets, optimizers, strict=True):
        calls = []

        def closure(net: Net = net, optimizer: BlockwiseOptimizer = optimizer, calls: list[bool] = calls) -> Tensor:
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            loss = net(TOKENS)
            loss.backward()
            return loss

        assert isinstance(optimizer.step(closure), Tensor) and calls == [True]
    same(nets, optimizers)


def test_every_scheduler_acts_on_every_block() -> None:
    nets, optimizers = pair_of_nets("lion_int8", lr=1e-2)
    schedules = [torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=8) for optimizer in optimizers]
    for _ in range(6):
        for net, optimizer, schedule in zip(nets, optimizers, schedules, strict=True):
            optimizer.zero_grad()
            net(TOKENS).backward()
            optimizer.step()
            schedule.step()
    same(nets, optimizers)


def test_a_learning_rate_that_changes_between_backward_and_step_is_said_once_and_the_step_is_whole() -> None:
    """Warnings are errors here, so the step is left at the end of what is said."""
    nets, optimizers = pair_of_nets()
    for net in nets:
        net(TOKENS).backward()
    optimizers[0].step()
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = 0.05
    with pytest.raises(UserWarning, match=r"changed between backward and step.*from the next backward on"):
        optimizers[1].step()
    for net, optimizer in zip(nets, optimizers, strict=True):
        optimizer.zero_grad()
        net(TOKENS).backward()
        optimizer.step()
    same(nets, optimizers)
    nets[1](TOKENS).backward()
    optimizers[1].param_groups[0]["lr"] = 0.25
    optimizers[1].step()


def test_a_group_waits_for_all_streams_that_its_gradients_came_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def __init__(self, stream_id: int, device_index: int, device_type: int):
            self.number = stream_id

        def wait_stream(self, stream: "Stream") -> None:
            done.append(f"{self.number} after {stream.number}")

    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(stepping, "current_stream_id", lambda device: (7, device.index, 1))
    for streams in ({(3, 0, 1), (7, 0, 1)}, {(7, 0, 1)}, set()):  # the last one on a CPU
        with ordered_after(streams):
            done.append("step")
    assert done == ["7 after 3", "step", "3 after 7", "step", "step"]


def test_a_step_without_a_backward_counts_as_it_does_without_release() -> None:
    pair = Pair("adamw_int8", {"a": (8, 64)})
    for optimizer in (pair.kept, pair.released):
        optimizer.step()
    pair.step()
    pair.check()


def test_a_backward_inside_autocast_steps_as_one_outside() -> None:
    pair = Pair("muon", {"a": (16, 24)}, lr=1e-2)
    for _ in range(2):
        grads = pair.gradients.next()
        backward(pair.params, grads)
        pair.kept.step()
        with torch.autocast("cpu", torch.bfloat16):
            (pair.twins["a"] * grads["a"]).sum().backward()
        pair.released.step()
        pair.kept.zero_grad()
    pair.check()


def test_parameters_that_thaw_or_come_late_are_released_too() -> None:
    shapes = {"a": (8, 64), "b": (8, 64)}
    pair = Pair("adamw_int8", shapes)
    late = [nn.Parameter(torch.ones(4, 64)) for _ in range(2)]
    for params, optimizer, param in zip((pair.params, pair.twins), (pair.kept, pair.released), late, strict=True):
        params["b"].requires_grad_(False)
        optimizer.add_param_group({"params": [("late", param)], "lr": 0.1})
        params["late"] = param
    for step in range(4):
        names = ("a", "late") if step < 2 else ("a", "b", "late")
        pair.step({name: torch.full(pair.params[name].shape, 0.1 * (step + 1)) for name in names})
        for params in (pair.params, pair.twins):
            params["b"].requires_grad_(step > 0)
    assert all(param.grad is None for param in pair.twins.values())
    pair.check()


def test_a_parameter_that_was_frozen_when_built_is_admitted_in_step_and_released_from_then_on() -> None:
    nets = [Net(), Net()]
    for net in nets:
        net.first.weight.requires_grad_(False)
    optimizers = [BlockwiseOptimizer(net, "adamw_int8", release=net is nets[1]) for net in nets]
    for step in range(3):
        for net, optimizer in zip(nets, optimizers, strict=True):
            net.first.weight.requires_grad_(True)
            optimizer.zero_grad()
            net(TOKENS).backward()
            assert net is nets[0] or (net.first.weight.grad is None) == (step > 0)
            optimizer.step()
    same(nets, optimizers)


# -- clipping and non-finite gradients -----------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_the_norm_of_the_step_before_clips_and_that_is_said(limit: float, caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair("adamw_int8", {"a": (8, 64), "b": (33,)}, release=GradientRelease(clip_norm=limit), lr=1e-2)
    assert "clipped to" in caplog.text and "by the norm of the step before" in caplog.text
    norm = None
    for step in range(4):
        grads = {name: grad * (step + 1) for name, grad in pair.gradients.next().items()}
        backward(pair.params, grads)
        before, norm = norm, torch.nn.utils.get_total_norm([p.grad for p in pair.params.values() if p.grad is not None])
        if before is not None:
            torch.nn.utils.clip_grads_with_norm_(pair.params.values(), limit, before)
        else:
            for param in pair.params.values():
                torch.nn.utils.clip_grad_norm_([param], limit * (param.numel() / (8 * 64 + 33)) ** 0.5)
        pair.kept.step()
        pair.kept.zero_grad()
        backward(pair.twins, grads)
        pair.released.step()
    pair.check()


def test_a_norm_from_a_checkpoint_goes_to_where_gradients_are() -> None:
    """A 16-bit gradient takes a factor of another device in full and rounds one of its own."""
    pair = Pair("adamw", {"a": (8, 64)}, release=GradientRelease(clip_norm=1.0))
    releaser = pair.released.releaser
    assert releaser is not None
    releaser.load_state_dict({"norm": torch.tensor(2.0)})
    assert releaser.norm_factor(1.0, params=[torch.empty(3, device="meta")]).device.type == "meta"


def test_values_are_clipped_in_the_same_step() -> None:
    pair = Pair("adamw", {"a": (8, 64)}, release=GradientRelease(clip_value=0.1))
    for _ in range(3):
        grads = pair.gradients.next()
        backward(pair.params, grads)
        torch.nn.utils.clip_grad_value_(pair.params.values(), 0.1)
        pair.kept.step()
        pair.kept.zero_grad()
        backward(pair.twins, grads)
        pair.released.step()
    pair.check()


@pytest.mark.parametrize("spec", ["adamw", "adamw_int8", "foam_l2_int8", "adamw_shared_in", "muon"])
def test_non_finite_elements_are_left_out_of_all_and_of_the_norm(spec: str) -> None:
    release = GradientRelease(clip_norm=1.0)
    pair, clean = (Pair(spec, {k: MATRICES[k] for k in ("linear", "odd")}, release=release) for _ in range(2))
    for step in range(3):
        grads = pair.gradients.next()
        clean_grads = {name: grad.clone() for name, grad in grads.items()}
        if step == 1:
            grads["linear"][3, 4], grads["odd"][0, 0] = float("nan"), float("-inf")
            clean_grads["linear"][3, 4] = clean_grads["odd"][0, 0] = 0
        backward(pair.twins, grads)
        assert step != 1 or pair.released.mask_nonfinite() == 2
        pair.released.step()
        backward(clean.twins, clean_grads)
        clean.released.step()
        assert torch.equal(pair.released.releaser.norm, clean.released.releaser.norm)  # pyright: ignore
    assert pair.released.num_nonfinite == 2
    assert pair.released.last_nonfinite == {"linear": 1, "odd": 1}


@pytest.mark.parametrize("spec", ["adamw", "adamw_int8", "foam_l2_int8", "muon+split8", "sign"])
def test_non_finite_elements_cost_what_they_cost_without_release(spec: str) -> None:
    pair = Pair(spec, MATRICES, lr=1e-2)
    for step in range(4):
        grads = pair.gradients.next()
        if step in (1, 2):
            grads["linear"][3, 4], grads["odd"][0, 0] = float("nan"), float("inf")
        pair.step(grads)
        assert pair.released.last_nonfinite == pair.kept.last_nonfinite
    pair.check()
    assert pair.released.num_nonfinite == pair.kept.num_nonfinite == 4


def test_raise_ends_the_backward() -> None:
    pair = Pair("adamw", {"a": (4,)}, nonfinite="raise")
    with pytest.raises(TrainingFailedError, match=r"1 gradient element.*NaN, infinite or beyond 2\^48 in step 1: a"):
        backward(pair.twins, {"a": torch.tensor([1.0, float("nan"), 1.0, 1.0])})


def test_gradients_beyond_the_limit_do_not_clip_the_next_step_to_nothing() -> None:
    pair = Pair("adamw", {"a": (4,)}, release=GradientRelease(clip_norm=1.0))
    backward(pair.twins, {"a": torch.full((4,), 3e38)})
    pair.released.step()
    before = pair.twins["a"].detach().clone()
    assert pair.released.releaser is not None and pair.released.releaser.norm == 0
    backward(pair.twins, {"a": torch.full((4,), 1.0)})
    pair.released.step()
    assert not torch.equal(pair.twins["a"], before)
