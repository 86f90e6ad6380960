"""Checkpoints of another plan and of torch.optim.AdamW, both ways; and those that cannot be read."""

import contextlib
import copy
import logging
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from baoc.core.catalogue import NATIVE
from baoc.errors import BaocError, CheckpointError
from baoc.optim.rules import RULES
from baoc.planning.cost import state_bytes
from baoc.types import StateKind
from tests.support.matched import last_rms_of
from tests.support.optimizing import (
    SHAPES,
    Gradients,
    assert_same,
    build,
    make_params,
    run_alike,
    run_steps,
    state_tensors,
    through_file,
    trained,
    twin_of,
    values,
)


class TestAnotherPlan:
    @pytest.mark.parametrize("source", ["adamw", "adamw_int8", "adafactor_momentum", "lion", "foam_l2", "sign"])
    def test_it_is_converted_with_the_error_reported(self, source: str, caplog: pytest.LogCaptureFixture) -> None:
        shapes = {"w": (17, 64), "c": (8, 3, 3, 5)}
        params, saved, _ = trained(shapes, source, lr=1e-2, steps=5)
        state = through_file(saved.state_dict())
        for target in NATIVE:
            optimizer = build(twin_of(params), target)
            with caplog.at_level(logging.INFO):
                optimizer.load_state_dict(state)
            report, rule = optimizer.load_report, RULES[NATIVE[target].rule].info
            assert report is not None
            planned = sum(state_bytes(block, spec=NATIVE[target], rule=rule) for block in optimizer.blocks)
            assert optimizer.state_bytes() == planned  # memory is the plan's, not the checkpoint's
            assert [move.target for move in report.moves] == ([] if target == source else [target] * 2)
            assert all(move.conversion_error.keys() <= {d.name for d in rule.states} for move in report.moves)
            fresh = {n: p for g in optimizer.param_groups for n, p in zip(g["param_names"], g["params"], strict=True)}
            run_steps(optimizer, fresh, gradients=Gradients(fresh), steps=2)
            assert all(p.isfinite().all() for p in fresh.values())
        assert f"block w: {source} -> " in caplog.text

    @pytest.mark.parametrize("name", ["adamw@updated", "greedy", "mine_int8_log"])
    def test_a_block_is_read_by_what_it_keeps_whatever_its_spec_is_called(self, name: str) -> None:
        """Steps on the CPU were removed and kept the states of those on the device; users name rows as they like."""
        params = make_params({"w": (17, 64)})
        own = replace(NATIVE["adamw"], name=name)
        saved, loaded = (build(of, "adamw" if "@" in name else own) for of in (params, twin_of(params)))
        run_steps(saved, params, gradients=Gradients(params), steps=2)
        checkpoint = through_file(saved.state_dict())
        checkpoint["blocks"]["w"]["spec"] = name
        loaded.load_state_dict(checkpoint)
        assert_same(state_tensors(loaded), state_tensors(saved))

    def test_states_of_a_row_that_was_removed_are_told(self) -> None:
        for spec, was, instead in (
            ("foam_l2", {"spec": "foam_l2_out", "rule": "foam_l2_out"}, "foam_l2"),
            ("adamw_int8", {"spec": "adamw_int8_log", "storage": "int8_log"}, "adamw_int8_root"),
        ):
            params = make_params({"w": (17, 64)})
            state = through_file(build(params, spec).state_dict())
            for entry in state["blocks"].values():
                entry |= was
            told = rf"^block w of the checkpoint .* {was['spec']} was removed, .* choose {instead}\."
            with pytest.raises(CheckpointError, match=told):
                build(twin_of(params), "adamw").load_state_dict(state)

    def test_int8_to_fp32_is_exact_and_fp32_to_int8_is_near(self) -> None:
        params, low, _ = trained({"w": (17, 64)}, "adamw_int8", steps=5)
        high = build(twin_of(params), "adamw")
        high.load_state_dict(low.state_dict())
        assert high.load_report is not None
        assert high.load_report.moves[0].conversion_error == {"m": 0.0, "v": 0.0}
        back = build(twin_of(params), "adamw_int8")
        back.load_state_dict(high.state_dict())
        assert back.load_report is not None
        assert 0 <= back.load_report.moves[0].conversion_error["m"] < 0.01

    def test_a_matched_block_aims_at_what_the_checkpoints_block_did(self) -> None:
        params, saved, _ = trained({"w": (17, 64)}, "adamw", lr=1e-2, steps=20)
        rms = last_rms_of(saved, "w")
        optimizer = build(twin_of(params), "lion")
        optimizer.load_state_dict(saved.state_dict())
        match = optimizer.registry.live["w"].match
        assert match is not None and match[0] == pytest.approx(rms, rel=1e-5) and match[1] < 0


class TestTorchAdamW:
    @pytest.mark.parametrize("named", [True, False])
    def test_its_checkpoint_is_gone_on_with_bitwise(self, named: bool) -> None:
        params = make_params(SHAPES)
        theirs = torch.optim.AdamW(list(params.items()) if named else list(params.values()), lr=3e-3, foreach=False)
        gradients = Gradients(params)
        run_steps(theirs, params, gradients=gradients, steps=5)
        other = twin_of(params)
        saved = through_file(theirs.state_dict())
        for state in saved["state"].values() if named else ():
            state["step"] = int(state["step"])  # as torch wrote it once
        order = dict(reversed(other.items())) if named else other  # by name, order does not matter
        ours = build(order, "adamw")
        ours.load_state_dict(saved)
        run_alike((theirs, ours), (params, other), gradients=gradients, steps=5)
        assert ours.param_groups[0]["lr"] == 3e-3
        assert_same(values(params), values(other))

    def test_ours_is_gone_on_with_by_torch_bitwise(self) -> None:
        params, ours, gradients = trained(SHAPES, "adamw", lr=3e-3, steps=5)
        other = twin_of(params)
        theirs = torch.optim.AdamW(list(other.values()), foreach=False)
        theirs.load_state_dict(through_file(ours.to_adamw_state_dict()))
        run_alike((ours, theirs), (params, other), gradients=gradients, steps=5)
        assert_same(values(params), values(other))

    @pytest.mark.parametrize("spec", ["adamw_int8", "adafactor_momentum", "foam_l2", "rmsprop", "sign"])
    def test_other_specs_are_inferred_or_left_to_start_afresh(self, spec: str) -> None:
        params, ours, _ = trained({"w": (17, 64)}, spec, steps=5)
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
        of_state, of_group = "the state of w in the checkpoint has", "a parameter group of the checkpoint has"
        for theirs, told in (
            (torch.optim.AdamW(list(params.values()), amsgrad=True, foreach=False), f"{of_state} .*max_exp_avg_sq"),
            (torch.optim.NAdam(list(params.values()), foreach=False), f"{of_state} .*mu_product.*without amsgrad"),
            (torch.optim.SGD(list(params.values()), foreach=False), f"{of_group} .*nesterov.*of another optimizer"),
        ):
            run_steps(theirs, params, gradients=Gradients(params), steps=1)
            with pytest.raises(CheckpointError, match=told):
                build(params).load_state_dict(theirs.state_dict())

    def test_another_number_of_nameless_parameters_is_refused(self) -> None:
        params = make_params({"w": (4, 8), "v": (4,)})
        theirs = torch.optim.AdamW([params["w"]], foreach=False)
        with pytest.raises(CheckpointError, match="has 1 parameters without names, this optimizer has 2"):
            build(params).load_state_dict(theirs.state_dict())


class TestBadCheckpoints:
    def broken(self, **changes: Any) -> dict[str, Any]:
        _, optimizer, _ = trained({"w": (4, 8)}, "adamw_int8", steps=1)
        return {**copy.deepcopy(optimizer.state_dict()), **changes}

    def load(self, state: dict[str, Any], *, shape: tuple[int, ...] = (4, 8)) -> None:
        """Loads into a trained optimizer, which must be as before if that fails."""
        _, optimizer, _ = trained({"w": shape}, "lion", lr=0.5, steps=1)
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

    def test_no_parameters_at_all(self) -> None:
        with pytest.raises(
            CheckpointError, match="has 0 parameter groups with no parameters, this optimizer has 1 par"
        ):
            self.load({"state": {}, "param_groups": []})

    def test_another_schema(self) -> None:
        for schema in (1, 99):
            with pytest.raises(CheckpointError, match=f"has schema {schema}, this version reads 2: load it with the"):
                self.load(self.broken(baoc_schema=schema))

    def test_a_part_that_is_missing(self) -> None:
        state = self.broken()
        del state["blocks"]
        with pytest.raises(CheckpointError, match="lacks blocks: it is damaged, use another one"):
            self.load(state)
        state = self.broken()
        del state["state"][0]["v.scale"]
        with pytest.raises(
            CheckpointError, match=r"v\.scale of w is missing in the checkpoint, adamw_int8 keeps \(1,\)"
        ):
            self.load(state)

    def test_a_kind_of_weights_that_was_removed(self) -> None:
        block = {"spec": "adamw+split16", "rule": "adamw", "storage": "fp32", "weights": "split16", "params": ["w"]}
        with pytest.raises(CheckpointError, match="16-bit corrections is resumed by an earlier version"):
            self.load(self.broken(blocks={"w": block}))

    def test_a_spec_that_is_not_known(self) -> None:
        with pytest.raises(CheckpointError, match=r"block w of the checkpoint cannot be read: no optimizer spec"):
            self.load(self.broken(blocks={"w": {"spec": "adamw_int1", "params": ["w"]}}))

    def test_another_models_shapes(self) -> None:
        with pytest.raises(CheckpointError, match=r"m of w is \(4, 8\) in the checkpoint, adamw_int8 keeps \(8, 4\)"):
            self.load(self.broken(), shape=(8, 4))

    def test_a_dtype_that_the_spec_does_not_keep(self) -> None:
        state = self.broken()
        state["state"][0]["m"] = state["state"][0]["m"].float()
        with pytest.raises(
            CheckpointError, match=r"m of w is torch\.float32 in the checkpoint, adamw_int8 keeps torch\.int8"
        ):
            self.load(state)

    def test_a_state_without_a_block(self) -> None:
        with pytest.raises(CheckpointError, match="has a state of w but no block for it"):
            self.load(self.broken(blocks={}))

    @pytest.mark.parametrize(
        "changes",
        [
            *({"num_steps": count} for count in (-1, True, 2.0, 10**30)),
            *({"tuned": {"lr": lr, "betas": None}} for lr in (math.nan, math.inf, -1.0)),
            *({"tuned": {"lr": 1.0, "betas": betas}} for betas in ([2.0, 0.9], [0.9, 1.0], [0.9, math.nan])),
            *({"match": torch.tensor(match)} for match in ([-1.0, 1.0], [math.nan, 1.0], [1.0, 1.0, 1.0])),
        ],
        ids=str,
    )
    def test_values_beside_the_states_that_nothing_leaves(self, changes: dict[str, Any]) -> None:
        state = self.broken()
        (state if "num_steps" in changes else state["blocks"]["w"]).update(changes)
        with pytest.raises(CheckpointError, match="the optimizer checkpoint is damaged"):
            self.load(state)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -5.0, 2.5, 1e30])
    def test_steps_that_are_no_count(self, value: float) -> None:
        _, saved, _ = trained({"w": (4, 8)}, "adamw", steps=1)
        state = copy.deepcopy(saved.state_dict())
        state["state"][0]["step"].fill_(value)
        with pytest.raises(
            CheckpointError, match=r"state step of w reaches from .* no step of adamw leaves: it is dam"
        ):
            self.load(state)

    @pytest.mark.parametrize("value", [math.nan, math.inf, "0", [1.0, 2.0]])
    def test_steps_of_torch_that_are_no_count(self, value: object) -> None:
        params = make_params({"w": (4, 8)})
        theirs = torch.optim.AdamW(list(params.values()), foreach=False)
        run_steps(theirs, params, gradients=Gradients(params), steps=1)
        state = theirs.state_dict()
        state["state"][0]["step"] = torch.tensor(value) if not isinstance(value, str) else value
        if isinstance(value, str):
            build(params).load_state_dict(state)  # a number as text is one
            return
        with pytest.raises(CheckpointError, match="damaged"):
            build(params).load_state_dict(state)

    @pytest.mark.parametrize("spec", NATIVE)
    def test_numbers_that_no_step_leaves(self, spec: str) -> None:
        """NaN and infinity in any state, below zero in scales and squares: each refused, with nothing changed."""
        _, saved, _ = trained({"w": (17, 64)}, spec, steps=2)
        kept = next(iter(saved.registry.live.values())).slots[0].states
        squares = {key for part in kept if part.decl.kind is StateKind.V for _, key in part.keys}
        for key, value in saved.state_dict()["state"][0].items():
            below = key in squares or key.endswith(".scale") or key == "step"
            for bad in (math.nan, math.inf, *([-1.0] if below else [])) if value.is_floating_point() else ():
                state = copy.deepcopy(saved.state_dict())
                state["state"][0][key].view(-1)[-1] = bad
                with pytest.raises(CheckpointError, match=f"state {re.escape(key)} of w reaches from"):
                    self.load(state, shape=(17, 64))

    def test_any_leaf_that_is_something_else(self) -> None:
        """Every value of a checkpoint replaced by values of other kinds: loaded or refused, never another error."""
        saved = self.broken()
        for path in _leaves(saved):
            for junk in (None, "text", -1, math.nan, [], {}, torch.tensor([1.0, math.nan]), True):
                state = copy.deepcopy(saved)
                _put(state, path, junk)
                with contextlib.suppress(BaocError):
                    build(make_params({"w": (4, 8)}), "lion").load_state_dict(state)

    @pytest.mark.parametrize("spec", ["adamw", "lion", "adamw_int8", "adafactor_momentum"])
    def test_ours_does_not_pass_for_torchs(self, spec: str) -> None:
        """torch.optim.AdamW checks nothing, but stumbles before its first step; `to_adamw_state_dict` is for it."""
        params, saved, _ = trained({"w": (4, 8)}, spec, steps=1)
        theirs = torch.optim.AdamW(list(params.values()), foreach=False)
        before = params["w"].detach().clone()
        with pytest.raises(KeyError):
            theirs.load_state_dict(saved.state_dict())
            run_steps(theirs, params, gradients=Gradients(params), steps=1)
        assert torch.equal(params["w"], before)


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values, containers included."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*([path] if path else []), *(found for key, item in items for found in _leaves(item, (*path, key)))]


def _put(value: Any, path: tuple[Any, ...], new: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = new


def test_settings_that_stay_the_checkpoint_s_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """A rate that a schedule has moved is told by its start."""

    def made(**settings: Any) -> Any:
        optimizer = build(make_params({"w": (4, 8)}), "adamw", **settings)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return optimizer, schedule

    first, schedule = made(lr=1e-2, weight_decay=0.1)
    first.step()
    schedule.step()
    same, _ = made(lr=1e-2, weight_decay=0.1)
    same.load_state_dict(first.state_dict())
    assert not caplog.text
    other, _ = made(lr=1e-3, weight_decay=0.2, betas=(0.8, 0.9))
    other.load_state_dict(first.state_dict())
    told = "go on: lr=0.01, not 0.001; weight_decay=0.1, not 0.2; betas=(0.9, 0.999), not (0.8, 0.9)"
    assert told in caplog.text and other.param_groups[0]["lr"] == 5e-3
