"""Saving and loading: bit for bit under the same plan, converted under another, told by name what is new or missing."""

import copy
import io
import logging
import pickle

import pytest
import torch
from torch import Tensor, nn

from baoc.core.catalogue import NATIVE
from baoc.errors import CheckpointError
from baoc.optim import BeforeStep, BlockwiseOptimizer
from baoc.optim.loading import LoadReport
from baoc.profiling.tracker import MemoryTracker
from baoc.types import OptimizerSpec
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
    state_tensors,
    states_by_name,
    through_file,
    trained,
    twin_of,
    values,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", NATIVE)
@pytest.mark.filterwarnings("ignore:16-bit weights")
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(spec: str, dtype: torch.dtype) -> None:
    params, optimizer, gradients = trained(shapes_for(spec), spec, lr=1e-2, weight_decay=0.1, dtype=dtype, steps=5)
    other = twin_of(params)
    resumed = build(other, spec)
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    assert_same(state_tensors(resumed), state_tensors(optimizer))
    assert resumed.load_report is not None and not resumed.load_report.moves
    run_alike((optimizer, resumed), (params, other), gradients=gradients, steps=4)
    assert_same(values(params), values(other))
    assert_same(state_tensors(resumed), state_tensors(optimizer))


def test_all_storages_of_one_plan_survive_together() -> None:
    applicable = {f"w{i:02}.{spec}": spec for i, spec in enumerate(NATIVE)}
    params, optimizer, _ = trained(dict.fromkeys(applicable, (17, 64)), applicable, lr=1e-2, steps=3)
    state = through_file(optimizer.state_dict())
    assert state["baoc_schema"] == 2
    resumed = build(twin_of(params), applicable)
    resumed.load_state_dict(state)
    assert_same(state_tensors(resumed), state_tensors(optimizer))
    assert resumed.param_groups[0]["lr"] == 1e-2 and resumed.param_groups[0]["betas"] == (0.9, 0.999)


def test_loading_shares_no_memory_with_what_was_loaded() -> None:
    params, a, _ = trained({"w": (8, 16), "v": (8,)}, {"w": "adamw_shared_in_int8", "v": "rmsprop"}, steps=3)
    other = twin_of(params)
    b = build(other, a.specs)
    b.load_state_dict(a.state_dict())
    before = {name: tensor.clone() for name, tensor in state_tensors(a).items()}
    pointers = {t.data_ptr() for t in state_tensors(a).values()}
    assert all(t.data_ptr() not in pointers for t in state_tensors(b).values())
    run_steps(b, other, gradients=Gradients(other), steps=2)
    b.param_groups[0]["lr"] = 7.0
    assert_same(state_tensors(a), before)
    assert a.param_groups[0]["lr"] == 1e-3


def test_an_optimizer_may_load_its_own_state() -> None:
    _, optimizer, _ = trained({"w": (8, 16), "v": (8,)}, {"w": "adamw_shared_in_int8+split8", "v": "rmsprop"}, steps=3)
    before = {name: tensor.clone() for name, tensor in state_tensors(optimizer).items()}
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same(state_tensors(optimizer), before)


class TestFiles:
    """The bytes in a file are the bytes of the state."""

    BOOKKEEPING = 1500  # per tensor, of torch's format and of names

    def block(self) -> tuple[dict[str, Tensor], BlockwiseOptimizer]:
        """Several parameters in one slab, of states of several types."""
        params = make_params({"big": (256, 300), "small": (16, 20), "norm": (33,)})
        block = one_block("all", [info(name, tuple(p.shape)) for name, p in params.items()])
        optimizer = build(params, {"all": "adamw_int8+split8"}, blocks=[block])
        run_steps(optimizer, params, gradients=Gradients(params), steps=2)
        return params, optimizer

    def size(self, state: object) -> int:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        return buffer.tell()

    def test_of_all(self) -> None:
        _, optimizer = self.block()
        saved = optimizer.state_dict()
        num_tensors = sum(len(state) for state in saved["state"].values())
        held = optimizer.state_bytes()
        assert held < self.size(saved) < held + self.BOOKKEEPING * num_tensors < 2 * held

    def test_of_one_parameter(self) -> None:
        """No tensor brings its whole slab along."""
        _, optimizer = self.block()
        saved = states_by_name(optimizer.state_dict())["small"]
        held = sum(tensor.nbytes for tensor in saved.values())
        assert self.size(saved) < held + self.BOOKKEEPING * len(saved) < 0.1 * optimizer.state_bytes()

    def test_of_copies_and_pickles(self) -> None:
        params, optimizer = self.block()
        held = optimizer.state_bytes() + sum(p.nbytes for p in params.values())
        data = pickle.dumps(optimizer)
        assert len(data) < held + 40_000
        for other in (pickle.loads(data), copy.deepcopy(optimizer)):
            assert other.block_state_bytes() == optimizer.block_state_bytes()
            states = [t for n, t in state_tensors(other).items() if not n.endswith(("step", "match"))]
            assert len({t.untyped_storage()._cdata for t in states}) == 1, "one slab per block"
            assert_same(state_tensors(other), state_tensors(optimizer))

    def test_saving_takes_no_second_state(self) -> None:
        _, optimizer = self.block()
        tracker = MemoryTracker().count_existing(optimizer.state)
        held = tracker.current_bytes
        with tracker:
            saved = optimizer.state_dict()
        assert tracker.peak_bytes - held < 1000 and saved["state"]

    def test_a_saved_state_is_the_live_one_until_it_is_copied(self) -> None:
        """As torch's."""
        params, optimizer = self.block()
        saved = states_by_name(optimizer.state_dict())["big"]["m"]
        run_steps(optimizer, params, gradients=Gradients(params), steps=1)
        assert torch.equal(saved, optimizer.state[params["big"]]["m"])


class TestThawing:
    """Parameters that are frozen when a checkpoint is loaded get their states when they train again."""

    def thawed_run(self) -> tuple[dict[str, Tensor], BlockwiseOptimizer, Gradients]:
        """b is frozen at first, and trains from step 3 on."""
        params = make_params({"a": (4, 8), "b": (4, 8)})
        params["b"].requires_grad_(False)
        optimizer = build(params, "adamw_int8", lr=1e-2)
        gradients = Gradients(params)
        for _ in range(2):
            gradients.give(params)
            params["b"].grad = None
            optimizer.step()
        params["b"].requires_grad_(True)
        run_steps(optimizer, params, gradients=gradients, steps=3)
        return params, optimizer, gradients

    @pytest.mark.parametrize("twice", [False, True], ids=["saved once", "saved again while frozen"])
    def test_states_come_back_bit_for_bit(self, twice: bool) -> None:
        params, optimizer, gradients = self.thawed_run()
        state = through_file(optimizer.state_dict())
        other = twin_of(params)
        other["b"].requires_grad_(False)
        resumed = build(other, "adamw_int8")
        resumed.load_state_dict(state)
        assert resumed.load_report is not None
        assert resumed.load_report.waiting_names == ("b",) and not resumed.load_report.unknown_names
        assert list(resumed.specs) == ["a"]
        if twice:
            resumed.load_state_dict(through_file(resumed.state_dict()))
        other["b"].requires_grad_(True)
        run_alike((optimizer, resumed), (params, other), gradients=gradients, steps=3)
        assert_same(values(params), values(other))
        assert_same(state_tensors(optimizer), state_tensors(resumed))
        assert set(states_by_name(resumed.state_dict())) == {"a", "b"}

    def test_a_group_that_comes_later_brings_back_its_states(self, caplog: pytest.LogCaptureFixture) -> None:
        params, optimizer, _ = self.thawed_run()
        other = twin_of(params)
        resumed = build({"a": other["a"]}, "adamw_int8")
        resumed.load_state_dict(optimizer.state_dict())
        assert resumed.load_report is not None and resumed.load_report.unknown_names == ("b",)
        assert set(states_by_name(resumed.state_dict())) == {"a"}, "what nobody has is not saved for ever"
        with caplog.at_level(logging.INFO):
            resumed.add_param_group({"params": [("b", other["b"])]})
        assert "b goes on from the states in the checkpoint" in caplog.text
        assert_same(state_tensors(resumed), state_tensors(optimizer))

    def test_another_shape_starts_afresh(self, caplog: pytest.LogCaptureFixture) -> None:
        params, optimizer, _ = self.thawed_run()
        resumed = build({"a": twin_of(params)["a"]}, "adamw_int8")
        resumed.load_state_dict(optimizer.state_dict())
        late = nn.Parameter(torch.randn(5, 8))
        with caplog.at_level(logging.WARNING):
            resumed.add_param_group({"params": [("b", late)]})
        assert "b starts afresh: state m of b is (4, 8)" in caplog.text
        assert int(resumed.state[late]["step"]) == 0

    def test_what_waits_is_a_copy(self) -> None:
        params, optimizer, gradients = self.thawed_run()
        resumed = build({"a": twin_of(params)["a"]}, "adamw_int8")
        resumed.load_state_dict(optimizer.state_dict())
        before = {name: value.clone() for name, value in optimizer.state[params["b"]].items()}
        run_steps(optimizer, params, gradients=gradients, steps=2)
        late = nn.Parameter(params["b"].detach().clone())
        resumed.add_param_group({"params": [("b", late)]})
        assert_same(resumed.state[late], before)


def test_rows_of_the_users_own_come_back_as_what_they_are() -> None:
    mine = OptimizerSpec(name="adamw", description="mine", rule="lion", storage="int8", weights="split8")
    params, optimizer, _ = trained({"w": (8, 16)}, {"w": mine}, steps=2)
    resumed = build(twin_of(params), {"w": mine})
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    assert resumed.load_report is not None and not resumed.load_report.moves
    assert_same(state_tensors(resumed), state_tensors(optimizer))


class TestNames:
    def test_what_was_frozen_starts_afresh_and_is_said(self, caplog: pytest.LogCaptureFixture) -> None:
        params = make_params({"a": (4, 8), "b": (4, 8)})
        params["b"].requires_grad_(False)
        saved = build(params)
        run_steps(saved, {"a": params["a"]}, gradients=Gradients({"a": params["a"]}), steps=3)
        optimizer = build(twin_of(params))
        with caplog.at_level(logging.WARNING):
            optimizer.load_state_dict(saved.state_dict())
        assert optimizer.load_report is not None
        assert optimizer.load_report.new_names == ("b",) and not optimizer.load_report.unknown_names
        assert "not in the checkpoint, so they start afresh: b" in caplog.text
        steps = {n: int(optimizer.state[p]["step"]) for p, n in optimizer.registry.names.items()}
        assert steps == {"a": 3, "b": 0}

    def test_what_is_not_trained_any_more_is_left_out_and_said(self, caplog: pytest.LogCaptureFixture) -> None:
        params, saved, _ = trained({"a": (4, 8), "b": (4, 8)}, steps=3)
        with caplog.at_level(logging.WARNING):
            only = build({"a": twin_of(params)["a"]})
            only.load_state_dict(saved.state_dict())
        assert only.load_report is not None and only.load_report.unknown_names == ("b",)
        assert "in the checkpoint but not trained here, so left out: b" in caplog.text

    @pytest.mark.parametrize("spec", ["adamw_int8", "rmsprop"])
    def test_parameters_and_blocks_in_another_order_are_matched_by_name(self, spec: str) -> None:
        params = make_params({"a": (4, 8), "b": (6, 3), "c": (4, 8)})
        blocks = [one_block(n, [info(n, tuple(params[n].shape))]) for n in params]
        saved = build(params, spec, blocks=blocks, lr=1e-2)
        run_steps(saved, params, gradients=Gradients(params), steps=3)
        other = dict(reversed(twin_of(params).items()))
        resumed = build(other, spec, blocks=[blocks[1], blocks[2], blocks[0]])
        resumed.load_state_dict(saved.state_dict())
        gradients = Gradients(params)
        run_alike((saved, resumed), (params, other), gradients=gradients, steps=3)
        assert_same(values(params), {name: values(other)[name] for name in params})

    @pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
    def test_names_that_a_wrapper_gave_are_those_of_the_model(self, prefix: str) -> None:
        params = make_params({"a": (4, 8), "b": (6, 3)})
        saved = build({prefix + name: param for name, param in params.items()}, "rmsprop")
        run_steps(saved, params, gradients=Gradients(params), steps=3)
        resumed = build(other := twin_of(params), "rmsprop")
        resumed.load_state_dict(saved.state_dict())
        assert resumed.load_report == LoadReport(whole_names=("a", "b"))
        gradients = Gradients(params)
        run_alike((saved, resumed), (params, other), gradients=gradients, steps=2)
        assert_same(values(params), values(other))

    def test_blocks_cut_otherwise_keep_their_states_and_targets(self) -> None:
        params = make_params({"a": (4, 8), "b": (4, 8)})
        both = one_block("both", [info(n, (4, 8)) for n in params])
        saved = build(params, {"both": "rmsprop"}, blocks=[both])
        saved.registry.live["both"].match[0] = 0.3  # pyright: ignore[reportOptionalSubscript]
        run_steps(saved, params, gradients=Gradients(params), steps=3)
        optimizer = build(twin_of(params), "rmsprop")
        optimizer.load_state_dict(saved.state_dict())
        assert optimizer.load_report is not None and not optimizer.load_report.moves
        for name in params:
            match = optimizer.registry.live[name].match
            assert match is not None and match.tolist() == pytest.approx([0.3, -1.0])

    def test_groups_are_matched_by_the_names_in_them(self) -> None:
        params = make_params({"a": (4, 8), "b": (4,), "c": (4, 8)})

        def make(named: dict[str, Tensor], *, turned: bool, lr: float) -> BlockwiseOptimizer:
            decayed = {"params": [(n, named[n]) for n in "ac"], "weight_decay": 0.1, "lr": lr}
            others = {"params": [("b", named["b"])], "weight_decay": 0.0, "lr": 2 * lr, "initial_lr": 5.0}
            return BlockwiseOptimizer([others, decayed] if turned else [decayed, others])

        saved = make(params, turned=False, lr=0.3)
        resumed = make(twin_of(params), turned=True, lr=0.1)
        resumed.load_state_dict(through_file(saved.state_dict()))
        by_name = {g["param_names"][0]: (g["lr"], g["weight_decay"]) for g in resumed.param_groups}
        assert by_name == {"b": (0.6, 0.0), "a": (0.3, 0.1)}
        merged = build(twin_of(params))
        with pytest.raises(CheckpointError, match=r"holds parameters that the checkpoint has in groups \[0, 1\]"):
            merged.load_state_dict(saved.state_dict())


class TestNamesOfOneSideOnly:
    """Of nameless parameters states are told by position, as torch does; other names are no checkpoint of this."""

    def net(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))

    def trained(self, params: object) -> BlockwiseOptimizer:
        optimizer = BlockwiseOptimizer(params, "adamw", lr=0.03)
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.full_like(param, 0.5)
        optimizer.step()
        return optimizer

    @pytest.mark.parametrize("saved_named", [True, False])
    def test_they_are_matched_by_position(self, saved_named: bool) -> None:
        first, second = self.net(), self.net()
        saved = self.trained(first if saved_named else first.parameters())
        resumed = BlockwiseOptimizer(second.parameters() if saved_named else second, "adamw", lr=1e-4)
        resumed.load_state_dict(through_file(saved.state_dict()))
        assert resumed.load_report is not None
        assert not resumed.load_report.new_names and not resumed.load_report.unknown_names
        assert resumed.param_groups[0]["lr"] == 0.03
        assert_same(state_tensors(resumed), state_tensors(saved))

    def test_of_torch_too(self) -> None:
        first, second = self.net(), self.net()
        saved = torch.optim.AdamW(first.named_parameters(), lr=0.03)
        for param in first.parameters():
            param.grad = torch.full_like(param, 0.5)
        saved.step()
        resumed = BlockwiseOptimizer(second.parameters())
        resumed.load_state_dict(saved.state_dict())
        assert {int(state["step"]) for state in resumed.state.values()} == {1}

    def test_other_groups_are_refused(self) -> None:
        first, second = self.net(), self.net()
        saved = self.trained(first.parameters())
        groups = [{"params": list(part.named_parameters(prefix=n))} for n, part in second.named_children()]
        with pytest.raises(CheckpointError, match=r"param0.* in groups of \[4\] .*0\.weight.* \[2, 2\].*by position"):
            BlockwiseOptimizer(groups).load_state_dict(saved.state_dict())

    def test_another_prefix_is_refused(self) -> None:
        class Wrapper(nn.Module):
            def __init__(self, net: nn.Module):
                super().__init__()
                self.net = net

        saved = self.trained(Wrapper(self.net()))
        optimizer = BlockwiseOptimizer(self.net(), lr=1e-4)
        told = r"group 0 has 0\.weight.*of which the checkpoint has nothing; it has net\.0\.weight.*a prefix"
        with pytest.raises(CheckpointError, match=told):
            optimizer.load_state_dict(saved.state_dict())
        assert optimizer.param_groups[0]["lr"] == 1e-4

    def test_another_shape_at_a_position_is_refused(self) -> None:
        saved = self.trained(self.net().parameters())
        other = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 5))
        with pytest.raises(
            CheckpointError, match=r"m of 0\.weight is \(5, 6\) in the checkpoint, adamw keeps \(4, 6\)"
        ):
            BlockwiseOptimizer(other).load_state_dict(saved.state_dict())

    def test_a_group_that_is_new_starts_afresh(self) -> None:
        net = self.net()
        saved = self.trained(net[0])
        both = BlockwiseOptimizer(
            [{"params": list(net[0].named_parameters())}, {"params": list(net[1].named_parameters(prefix="head"))}]
        )
        both.load_state_dict(saved.state_dict())
        assert both.load_report is not None and both.load_report.new_names == ("head.weight", "head.bias")


@pytest.mark.parametrize("spec", ["adamw", "adamw_shared_in_int8", "sign", "adamw_int8+split8", "adamw_int8+bf16_sr"])
def test_copies_and_pickles_step_as_the_original(spec: str) -> None:
    params = make_params({"w": (17, 64)})
    optimizer = build(params, spec)
    optimizer.before_step.append(BeforeStep(call=lambda: None))  # not copied: it belongs to whoever subscribed
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # wraps `step` of the instance
    run_steps(optimizer, params, gradients=Gradients(params), steps=3)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        twin = {"w": other.param_groups[0]["params"][0]}
        assert not other.before_step and twin["w"] is not params["w"]
        reference = build({"w": nn.Parameter(params["w"].detach().clone())}, spec)
        reference.load_state_dict(optimizer.state_dict())
        expected = {"w": reference.param_groups[0]["params"][0]}
        for named, which in ((twin, other), (expected, reference)):
            run_steps(which, named, gradients=Gradients(named), steps=2)
        assert_same(values(twin), values(expected))


def test_hooks_on_saving_and_loading_are_called() -> None:
    optimizer, seen = build(make_params({"w": (4, 8)})), []
    optimizer.register_state_dict_pre_hook(lambda *_: seen.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(state["extra"]))
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("after loading"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before saving", 1, "after loading"]
