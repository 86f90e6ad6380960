"""Saving and loading: bit for bit under the same plan, converted under another, told by name what is new or missing."""

import copy
import io
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from baoc.catalogue import SPECS
from baoc.cost import state_bytes
from baoc.errors import CheckpointError
from baoc.optim import BlockwiseOptimizer
from baoc.rules import RULES
from tests.optimizing import (
    SHAPES,
    Gradients,
    assert_same,
    build,
    info,
    make_params,
    one_block,
    run_steps,
    shapes_for,
    state_tensors,
)


def through_file(state: dict[str, Any]) -> dict[str, Any]:
    """Written and read as the strictest loader does: tensors and plain values only."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def twin_of(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: nn.Parameter(p.detach().clone()) for name, p in params.items()}


def values(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in params.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.filterwarnings("ignore:16-bit weights")
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(spec: str, dtype: torch.dtype) -> None:
    params = make_params(shapes_for(spec), dtype=dtype)
    optimizer = build(params, spec, lr=1e-2, weight_decay=0.1)
    gradients = Gradients(params)
    run_steps(optimizer, params, gradients=gradients, steps=5)
    other = twin_of(params)
    resumed = build(other, spec)
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    assert_same(state_tensors(resumed), state_tensors(optimizer))
    assert resumed.load_report is not None and not resumed.load_report.moves
    for _ in range(4):
        gradients.give(params, other)
        optimizer.step()
        resumed.step()
    assert_same(values(params), values(other))
    assert_same(state_tensors(resumed), state_tensors(optimizer))


def test_all_storages_of_one_plan_survive_together() -> None:
    applicable = {f"w{i:02}.{spec}": spec for i, spec in enumerate(SPECS)}
    params = make_params(dict.fromkeys(applicable, (17, 64)))
    optimizer = build(params, applicable, lr=1e-2)
    run_steps(optimizer, params, gradients=Gradients(params), steps=3)
    state = through_file(optimizer.state_dict())
    assert state["baoc_schema"] == 1
    resumed = build(twin_of(params), applicable)
    resumed.load_state_dict(state)
    assert_same(state_tensors(resumed), state_tensors(optimizer))
    assert resumed.param_groups[0]["lr"] == 1e-2 and resumed.param_groups[0]["betas"] == (0.9, 0.999)


def test_loading_shares_no_memory_with_what_was_loaded() -> None:
    params = make_params({"w": (8, 16), "v": (8,)})
    a = build(params, {"w": "adamw_shared_in_int8", "v": "rmsprop"})
    run_steps(a, params, gradients=Gradients(params), steps=3)
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


class TestAnotherPlan:
    @pytest.mark.parametrize("source", ["adamw", "adamw_int8", "adafactor_momentum", "lion", "foam_l2", "sign"])
    def test_it_is_converted_with_the_error_reported(self, source: str, caplog: pytest.LogCaptureFixture) -> None:
        shapes = {"w": (17, 64), "c": (8, 3, 3, 5)}
        params = make_params(shapes)
        saved = build(params, source, lr=1e-2)
        run_steps(saved, params, gradients=Gradients(params), steps=5)
        state = through_file(saved.state_dict())
        for target in SPECS:
            optimizer = build(twin_of(params), target)
            with caplog.at_level(logging.INFO):
                optimizer.load_state_dict(state)
            report, rule = optimizer.load_report, RULES[SPECS[target].rule].info
            assert report is not None
            planned = sum(state_bytes(block, spec=SPECS[target], rule=rule) for block in optimizer.blocks)
            assert optimizer.state_bytes() == planned  # memory is the plan's, not the checkpoint's
            assert [move.target for move in report.moves] == ([] if target == source else [target] * 2)
            assert all(move.conversion_error.keys() <= {d.name for d in rule.states} for move in report.moves)
            fresh = {n: p for g in optimizer.param_groups for n, p in zip(g["param_names"], g["params"], strict=True)}
            run_steps(optimizer, fresh, gradients=Gradients(fresh), steps=2)
            assert all(p.isfinite().all() for p in fresh.values())
        assert f"block w: {source} -> " in caplog.text

    def test_int8_to_fp32_is_exact_and_fp32_to_int8_is_near(self) -> None:
        params = make_params({"w": (17, 64)})
        low = build(params, "adamw_int8")
        run_steps(low, params, gradients=Gradients(params), steps=5)
        high = build(twin_of(params), "adamw")
        high.load_state_dict(low.state_dict())
        assert high.load_report is not None
        assert high.load_report.moves[0].conversion_error == {"m": 0.0, "v": 0.0}
        back = build(twin_of(params), "adamw_int8")
        back.load_state_dict(high.state_dict())
        assert back.load_report is not None
        assert 0 <= back.load_report.moves[0].conversion_error["m"] < 0.01

    def test_a_matched_block_aims_at_what_the_checkpoints_block_did(self) -> None:
        params = make_params({"w": (17, 64)})
        saved = build(params, "adamw", lr=1e-2)
        run_steps(saved, params, gradients=Gradients(params), steps=20)
        rms = saved.update_rms()["w"]
        optimizer = build(twin_of(params), "lion")
        optimizer.load_state_dict(saved.state_dict())
        match = optimizer.roster.live["w"].match
        assert match is not None and match[0] == pytest.approx(rms, rel=1e-5) and match[1] < 0


class TestTorchAdamW:
    @pytest.mark.parametrize("named", [True, False])
    def test_its_checkpoint_is_gone_on_with_bitwise(self, named: bool) -> None:
        params = make_params(SHAPES)
        theirs = torch.optim.AdamW(list(params.items()) if named else list(params.values()), lr=3e-3, foreach=False)
        gradients = Gradients(params)
        run_steps(theirs, params, gradients=gradients, steps=5)
        other = twin_of(params)
        order = dict(reversed(other.items())) if named else other  # by name, order does not matter
        ours = build(order, "adamw")
        ours.load_state_dict(through_file(theirs.state_dict()))
        for _ in range(5):
            gradients.give(params, other)
            theirs.step()
            ours.step()
        assert ours.param_groups[0]["lr"] == 3e-3
        assert_same(values(params), values(other))

    def test_ours_is_gone_on_with_by_torch_bitwise(self) -> None:
        params = make_params(SHAPES)
        ours = build(params, "adamw", lr=3e-3)
        gradients = Gradients(params)
        run_steps(ours, params, gradients=gradients, steps=5)
        other = twin_of(params)
        theirs = torch.optim.AdamW(list(other.values()), foreach=False)
        theirs.load_state_dict(through_file(ours.to_adamw_state_dict()))
        for _ in range(5):
            gradients.give(params, other)
            ours.step()
            theirs.step()
        assert_same(values(params), values(other))

    @pytest.mark.parametrize("spec", ["adamw_int8", "adafactor_momentum", "foam_l2", "rmsprop", "sign"])
    def test_other_specs_are_inferred_or_left_to_start_afresh(self, spec: str) -> None:
        params = make_params({"w": (17, 64)})
        ours = build(params, spec)
        run_steps(ours, params, gradients=Gradients(params), steps=5)
        before = {name: value.clone() for name, value in state_tensors(ours).items()}
        state = ours.to_adamw_state_dict()
        assert_same(state_tensors(ours), before)
        assert (0 in state["state"]) == (spec != "sign")
        other = twin_of(params)
        theirs = torch.optim.AdamW(list(other.values()), foreach=False)
        theirs.load_state_dict(state)
        run_steps(theirs, other, gradients=Gradients(other), steps=2)
        assert other["w"].isfinite().all()

    @pytest.mark.filterwarnings("ignore:16-bit weights")
    def test_bf16_states_of_a_bf16_model_are_taken_in_fp32(self) -> None:
        params = make_params({"w": (17, 64)}, dtype=torch.bfloat16)
        theirs = torch.optim.AdamW(list(params.values()), foreach=False)
        run_steps(theirs, params, gradients=Gradients(params), steps=3)
        ours = build(twin_of(params), "adamw")
        ours.load_state_dict(theirs.state_dict())
        assert {t.dtype for t in state_tensors(ours).values()} == {torch.float32}

    def test_amsgrad_and_other_optimizers_are_refused(self) -> None:
        params = make_params({"w": (4, 8)})
        for theirs, has in (
            (torch.optim.AdamW(list(params.values()), amsgrad=True, foreach=False), "max_exp_avg_sq"),
            (torch.optim.SGD(list(params.values()), momentum=0.9, foreach=False), "momentum_buffer"),
        ):
            run_steps(theirs, params, gradients=Gradients(params), steps=1)
            with pytest.raises(CheckpointError, match=f"the state of w in the checkpoint has .*{has}.*without amsgrad"):
                build(params).load_state_dict(theirs.state_dict())

    def test_another_number_of_nameless_parameters_is_refused(self) -> None:
        params = make_params({"w": (4, 8), "v": (4,)})
        theirs = torch.optim.AdamW([params["w"]], foreach=False)
        with pytest.raises(CheckpointError, match="has 1 parameters without names, this optimizer has 2"):
            build(params).load_state_dict(theirs.state_dict())


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
        steps = {n: int(optimizer.state[p]["step"]) for p, n in optimizer.roster.names.items()}
        assert steps == {"a": 3, "b": 0}

    def test_what_is_not_trained_any_more_is_left_out_and_said(self, caplog: pytest.LogCaptureFixture) -> None:
        params = make_params({"a": (4, 8), "b": (4, 8)})
        saved = build(params)
        run_steps(saved, params, gradients=Gradients(params), steps=3)
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
        for _ in range(3):
            gradients.give(params, other)
            saved.step()
            resumed.step()
        assert_same(values(params), {name: values(other)[name] for name in params})

    def test_blocks_cut_otherwise_keep_their_states_and_targets(self) -> None:
        params = make_params({"a": (4, 8), "b": (4, 8)})
        both = one_block("both", [info(n, (4, 8)) for n in params])
        saved = build(params, {"both": "rmsprop"}, blocks=[both], target_rms={"both": 0.3})
        run_steps(saved, params, gradients=Gradients(params), steps=3)
        optimizer = build(twin_of(params), "rmsprop")
        optimizer.load_state_dict(saved.state_dict())
        assert optimizer.load_report is not None and not optimizer.load_report.moves
        for name in params:
            match = optimizer.roster.live[name].match
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


class TestBadCheckpoints:
    def broken(self, **changes: Any) -> dict[str, Any]:
        params = make_params({"w": (4, 8)})
        optimizer = build(params, "adamw_int8")
        run_steps(optimizer, params, gradients=Gradients(params), steps=1)
        return {**copy.deepcopy(optimizer.state_dict()), **changes}

    def load(self, state: dict[str, Any], *, shape: tuple[int, ...] = (4, 8)) -> None:
        """Loads into a trained optimizer, which must be as before if that fails."""
        params = make_params({"w": shape})
        optimizer = build(params, "lion", lr=0.5)
        run_steps(optimizer, params, gradients=Gradients(params), steps=1)
        before = {name: value.clone() for name, value in state_tensors(optimizer).items()}
        try:
            optimizer.load_state_dict(state)
        finally:
            assert_same(state_tensors(optimizer), before)
            assert optimizer.param_groups[0]["lr"] == 0.5

    def test_something_else_altogether(self) -> None:
        with pytest.raises(CheckpointError, match=r"no optimizer checkpoint \(its keys are model\)"):
            self.load({"model": {}})
        with pytest.raises(CheckpointError, match="its keys are none"):
            self.load({})

    def test_a_schema_of_the_future(self) -> None:
        with pytest.raises(CheckpointError, match="has schema 99, this version reads 1"):
            self.load(self.broken(baoc_schema=99))

    def test_a_part_that_is_missing(self) -> None:
        state = self.broken()
        del state["blocks"]
        with pytest.raises(CheckpointError, match=r"damaged \(KeyError: 'blocks'\): use another one"):
            self.load(state)
        state = self.broken()
        del state["state"]["w"]["v.scale"]
        with pytest.raises(
            CheckpointError, match=r"v\.scale of w is missing in the checkpoint, adamw_int8 keeps \(1,\)"
        ):
            self.load(state)

    def test_a_spec_that_is_not_known(self) -> None:
        with pytest.raises(CheckpointError, match=r"block w of the checkpoint cannot be read: .* no optimizer spec"):
            self.load(self.broken(blocks={"w": {"spec": "adamw_int1", "params": ["w"]}}))

    def test_another_models_shapes(self) -> None:
        with pytest.raises(CheckpointError, match=r"m of w is \(4, 8\) in the checkpoint, adamw_int8 keeps \(8, 4\)"):
            self.load(self.broken(), shape=(8, 4))

    def test_a_dtype_that_the_spec_does_not_keep(self) -> None:
        state = self.broken()
        state["state"]["w"]["m"] = state["state"]["w"]["m"].float()
        with pytest.raises(
            CheckpointError, match=r"m of w is torch\.float32 in the checkpoint, adamw_int8 keeps torch\.int8"
        ):
            self.load(state)

    def test_a_state_without_a_block(self) -> None:
        with pytest.raises(CheckpointError, match="has a state of w but no block for it"):
            self.load(self.broken(blocks={}))


@pytest.mark.parametrize("spec", ["adamw", "adamw_shared_in_int8", "sign"])
def test_copies_and_pickles_step_as_the_original(spec: str) -> None:
    params = make_params({"w": (17, 64)})
    optimizer = build(params, spec)
    optimizer.observer = lambda: None  # not copied: it belongs to whoever set it
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # wraps `step` of the instance
    run_steps(optimizer, params, gradients=Gradients(params), steps=3)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        twin = {"w": other.param_groups[0]["params"][0]}
        assert other.observer is None and twin["w"] is not params["w"]
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
