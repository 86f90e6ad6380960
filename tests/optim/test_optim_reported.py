"""Defects that were reported of the optimizer and its drop-in form: names, late parameters, checkpoints, junk."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from baoc import BaocOptimizer
from baoc.config.schema import ReallocationConfig
from baoc.errors import BadInputError, CheckpointError
from baoc.optim import BlockwiseOptimizer
from baoc.planning.cost import adamw_state_bytes
from baoc.planning.planner import PlannerSettings
from baoc.training.session import SessionSettings
from baoc.types import to_plain
from tests.support.optimizing import Gradients, build, info, make_params, one_block

SHAPES = {"a": (4, 8), "b": (4, 8)}


def moved(param: Tensor, optimizer: torch.optim.Optimizer) -> bool:
    before = param.detach().clone()
    param.grad = torch.ones_like(param)
    optimizer.step()
    return not torch.equal(before, param.detach())


class TestNames:
    def test_unnamed_late_parameters_get_names_that_are_free(self) -> None:
        early, late, later = (nn.Parameter(torch.ones(3)) for _ in range(3))
        optimizer = BlockwiseOptimizer([("param1", early)], lr=0.1)
        optimizer.add_param_group({"params": [late, later]})
        assert set(optimizer.specs) == {"param1", "param2", "param3"}
        assert all(moved(param, optimizer) for param in (early, late, later))

    def test_a_late_name_that_is_taken_is_refused_and_nothing_changes(self) -> None:
        early, late = (nn.Parameter(torch.ones(3)) for _ in range(2))
        optimizer = BlockwiseOptimizer([("w", early)], lr=0.1)
        with pytest.raises(BadInputError, match="'w': it occurs twice, in parameter groups 0 and 1"):
            optimizer.add_param_group({"params": [("w", late)]})
        assert len(optimizer.param_groups) == 1 and moved(early, optimizer)

    def test_a_refused_late_group_leaves_no_trace(self) -> None:
        optimizer = BlockwiseOptimizer([("w", nn.Parameter(torch.ones(4, 4)))], "foam_l1")
        bias = nn.Parameter(torch.ones(4))
        with pytest.raises(BadInputError, match="bias cannot run foam_l1"):
            optimizer.add_param_group({"params": [("v", nn.Parameter(torch.ones(4, 4))), ("bias", bias)]})
        with pytest.raises(BadInputError, match="lr is -1"):
            optimizer.add_param_group({"params": [("v", nn.Parameter(torch.ones(4, 4)))], "lr": -1})
        assert list(optimizer.specs) == ["w"] and len(optimizer.param_groups) == 1

    def test_a_late_parameter_called_as_a_block_does_not_replace_it(self) -> None:
        params = make_params(SHAPES)
        block = one_block("late", [info("a", (4, 8)), info("b", (4, 8))])
        optimizer = build(params, {"late": "adamw"}, blocks=[block], lr=0.1)
        late = nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [("late", late)]})
        assert set(optimizer.specs) == {"late", "late_late"}
        assert moved(params["a"], optimizer) and moved(late, optimizer)

    @pytest.mark.parametrize("make", [BlockwiseOptimizer, BaocOptimizer])
    def test_one_name_in_two_groups(self, make: Any) -> None:
        groups = [{"params": [("w", nn.Parameter(torch.ones(3)))]} for _ in range(2)]
        with pytest.raises(BadInputError, match="'w': it occurs twice, in parameter groups 0 and 1"):
            make(groups)


def step_all(optimizer: torch.optim.Optimizer) -> None:
    for param in [p for group in optimizer.param_groups for p in group["params"]]:
        param.grad = torch.ones_like(param)
    optimizer.step()


def watching() -> BaocOptimizer:
    """That samples gradients for six steps."""
    torch.manual_seed(0)
    settings = SessionSettings(
        planner=PlannerSettings(risk="statistics"), reallocation=ReallocationConfig(mode="once", warmup_steps=6)
    )
    return BaocOptimizer(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 4)), budget="state_25", settings=settings)


ABSENT = object()


def places(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys of a nested state, of equals the first."""
    for key in list(node)[:1] if at[:1] == ("choices",) or at == ("profile", "stats") else node:
        yield (*at, key)
        if isinstance(node[key], dict):
            yield from places(node[key], (*at, key))


def changed(node: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    key, *rest = path
    if rest:
        return {**node, key: changed(node[key], tuple(rest), value)}
    return {k: v for k, v in node.items() if k != key} | ({} if value is ABSENT else {key: value})


class TestBaocOptimizer:
    @pytest.mark.parametrize("spell", [lambda m: m, lambda m: m.parameters(), lambda m: m.named_parameters()])
    def test_what_was_frozen_trains_once_thawed(self, spell: Any) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model[0].requires_grad_(False)
        optimizer = BaocOptimizer(spell(model), budget="state_50", lr=0.1)
        assert sum(len(block.params) for block in optimizer.reallocator.planner.blocks) == 2
        assert len(optimizer.param_groups[0]["params"]) == 4
        model[0].requires_grad_(True)
        assert all(moved(param, optimizer) for param in model.parameters())

    def test_groups_of_another_optimizer_with_names(self) -> None:
        model = nn.Linear(8, 8)
        groups = torch.optim.AdamW(list(model.named_parameters())).param_groups
        assert BaocOptimizer(groups, budget="state_50").param_groups[0]["param_names"] == ["weight", "bias"]

    @pytest.mark.parametrize("make", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
    def test_a_copy_with_its_model_trains_on_alike_across_a_reallocation(self, make: Any) -> None:
        settings = SessionSettings(
            planner=PlannerSettings(risk="statistics"), reallocation=ReallocationConfig(mode="once", warmup_steps=6)
        )
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 4))
        pair = (model, BaocOptimizer(model, budget="state_25", lr=0.1, settings=settings))
        data = torch.randn(10, 64, 8)

        def train(pair: tuple[nn.Module, BaocOptimizer], batches: Tensor) -> None:
            model, optimizer = pair
            for x in batches:
                optimizer.zero_grad()
                (model(x) - x[:, :4]).square().mean().backward()
                optimizer.step()

        train(pair, data[:4])
        twin = make(pair)
        train(pair, data[4:])
        train(twin, data[4:])
        assert twin[1].reallocator.last_decision == pair[1].reallocator.last_decision == 6
        assert twin[1].specs == pair[1].specs and twin[1].plan == pair[1].plan
        for name, param in twin[0].named_parameters():
            assert torch.equal(param, pair[0].get_parameter(name)), name
            assert param is not pair[0].get_parameter(name)

    @pytest.mark.slow
    def test_while_the_first_step_is_measured_it_cannot_be_copied(self) -> None:
        optimizer = BaocOptimizer(nn.Linear(4, 4), budget="100mb")
        with pytest.raises(TypeError, match=r"shallow copy .* use copy\.deepcopy"):
            copy.copy(optimizer)
        for make in (copy.deepcopy, pickle.dumps):
            with pytest.raises(
                TypeError, match=r"measures the memory of its first step.*take a step first, or .*probe="
            ):
                make(optimizer)
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert copy.deepcopy(optimizer).specs == optimizer.specs

    @pytest.mark.parametrize("damage", ["shape", "online", "profile", "choices", "step"])
    def test_a_checkpoint_that_is_refused_changes_nothing(self, damage: str) -> None:
        source, target = watching(), watching()
        step_all(source)
        saved = copy.deepcopy(source.state_dict())
        saved["online"]["choices"] = dict.fromkeys(saved["online"]["choices"], "sign")
        assert set(target.specs.values()) != {"sign"}
        if damage == "shape":
            name, key = next((n, k) for n, s in saved["state"].items() for k in s if k != "step")
            saved["state"][name][key] = torch.zeros(1, 2, 3, dtype=saved["state"][name][key].dtype)
        elif damage == "online":
            del saved["online"]["gap"]
        else:
            saved["online"][damage] = {"stats": 3} if damage == "profile" else "a"
        specs, plan, step = target.specs, target.plan, target.reallocator.step
        with pytest.raises(CheckpointError):
            target.load_state_dict(saved)
        assert target.specs == specs and target.plan is plan and target.reallocator.step == step

    def test_statistics_of_another_layout_start_anew_and_that_is_said(self) -> None:
        source, target = watching(), watching()
        step_all(source)
        saved = copy.deepcopy(source.state_dict())
        saved["online"]["profiler"]["layout"] = ["another"]
        told: list[str] = []
        target.reallocator.listeners.append(lambda event, *_: told.append(event.why))
        target.load_state_dict(saved)
        assert told == ["statistics of gradients start anew"]
        assert target.reallocator.step == target.reallocator.profiled_since_step == 1

    @pytest.mark.slow
    def test_one_wrong_value_is_refused_with_nothing_changed_or_said_or_trained_on(self) -> None:
        source, target = watching(), watching()
        for _ in range(4):
            step_all(source)
        saved = copy.deepcopy(source.state_dict())
        assert source.reallocator.profiler is not None
        saved["online"]["profile"] = to_plain(source.reallocator.profiler.profile())
        refused = went_on = 0
        for path in places(saved["online"]):
            for value in (ABSENT, "x", torch.zeros(2, 3)):
                online = changed(saved["online"], path, value)
                before = target.plan, target.reallocator.step, target.specs
                try:
                    target.load_state_dict({**saved, "online": online})
                    step_all(target)
                except CheckpointError as error:
                    assert "'online' of the optimizer checkpoint is damaged: " in str(error)
                    assert before == (target.plan, target.reallocator.step, target.specs)
                    refused += 1
                else:
                    went_on, target = went_on + 1, watching()
        assert refused > 90 and went_on > 30

    def test_float64_models_are_profiled(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).double()
        x = torch.randn(64, 16, dtype=torch.float64)
        settings = SessionSettings(reallocation=ReallocationConfig(mode="once", warmup_steps=4))
        optimizer = BaocOptimizer(model, budget="state_25", lr=1e-2, settings=settings)
        losses = []
        for _ in range(12):
            optimizer.zero_grad()
            loss = (model(x) - x[:, :8]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] and optimizer.reallocator.last_decision == 4

    def test_a_probe_must_run_backward(self) -> None:
        model = nn.Linear(8, 8)
        with pytest.raises(BadInputError, match="must run forward and backward"):
            BaocOptimizer(model, budget="300mb", probe=lambda: None)

    @pytest.mark.parametrize("shape", [(0,), (0, 5)])
    def test_an_empty_parameter_alone_is_no_trouble(self, shape: tuple[int, ...]) -> None:
        param = nn.Parameter(torch.zeros(shape))
        optimizer = BaocOptimizer([param], budget="state_25")
        param.grad = torch.zeros_like(param)
        optimizer.step()
        assert optimizer.state_bytes() == optimizer.plan.allocation.state_bytes == 0
        assert adamw_state_bytes(optimizer.blocks) == 0


class TestWhatOthersDoToIt:
    @pytest.mark.slow
    def test_states_that_were_moved_away_and_back_are_those_that_are_stepped(self) -> None:
        """As who frees a GPU between two phases does; backends know states by address."""
        params = make_params({"w": (8, 16)})
        optimizer = build(params, "adamw", backend="native")
        assert moved(params["w"], optimizer)
        state = optimizer.state[params["w"]]
        for key, value in state.items():
            state[key] = value.clone()
        before = state["m"].clone()
        assert moved(params["w"], optimizer)
        assert not torch.equal(optimizer.state_dict()["state"][0]["m"], before)

    @pytest.mark.parametrize("late", [False, True])
    def test_parameters_that_were_put_into_a_group_do_not_stand_still(self, late: bool) -> None:
        params = make_params(SHAPES)
        optimizer = build(params, "adamw_int8")
        listed = optimizer.param_groups[0]["params"]
        listed[:] = [*listed, *listed[:1]] if late else [nn.Parameter(torch.ones(4, 8)), *listed[1:]]
        with pytest.raises(BadInputError, match=r"parameters in param_groups are not those .* with add_param_group"):
            moved(params["a"], optimizer)


class TestMasks:
    @pytest.mark.parametrize("policy", ["skip_element", "skip_step"])
    @pytest.mark.parametrize("drop", ["to_none", "to_zero", "by_hand"])
    def test_new_gradients_have_no_old_masks(self, policy: str, drop: str) -> None:
        params = make_params(SHAPES)
        optimizer = build(params, lr=0.1, nonfinite=policy)
        for param in params.values():
            param.grad = torch.full_like(param, torch.nan)
        assert optimizer.mask_nonfinite() == 64
        if drop == "by_hand":
            for param in params.values():
                param.grad = None
        else:
            optimizer.zero_grad(set_to_none=drop == "to_none")
        assert all(moved(param, optimizer) for param in params.values())

    def test_new_gradients_are_looked_at_again(self) -> None:
        params = make_params(SHAPES)
        optimizer = build(params, lr=0.1)
        Gradients(params).give(params)
        optimizer.mask_nonfinite()
        for param in params.values():
            param.grad = torch.full_like(param, torch.nan)
        optimizer.step()
        assert optimizer.num_nonfinite == 64 and all(param.isfinite().all() for param in params.values())

    def test_a_copy_between_looking_and_stepping(self) -> None:
        params = make_params(SHAPES)
        optimizer = build(params, lr=0.1)
        for param in params.values():
            param.grad = torch.full_like(param, torch.nan)
        optimizer.mask_nonfinite()
        assert copy.deepcopy(optimizer).num_nonfinite == 64


class TestJunk:
    @pytest.mark.parametrize("make", [BlockwiseOptimizer, BaocOptimizer])
    @pytest.mark.parametrize(
        ("params", "text"),
        [
            (None, "the optimizer was given a NoneType: pass a module"),
            ([{"params": nn.Sequential(nn.Linear(2, 2))}], "of parameter group 0 is a Sequential: list its tensors"),
            ([{"params": [nn.Linear(2, 2)]}], "param0 is a Linear, not a tensor"),
            ([{"params": 3}], "'params' of parameter group 0 is a int: pass"),
            ([{"lr": 0.1}], "parameter group 0 has the keys lr: give each group its parameters"),
            ([{"params": [nn.Parameter(torch.ones(2))]}, 3], "parameter group 1 is no dict"),
            ({"w": nn.Parameter(torch.ones(2))}, "parameter group 0 has the keys w"),
            ([("a", torch.ones(2), 1)], "no list of tensors or"),
        ],
    )
    def test_parameters(self, make: Any, params: Any, text: str) -> None:
        with pytest.raises(BadInputError, match=text):
            make(params)

    @pytest.mark.parametrize("make", [BlockwiseOptimizer, BaocOptimizer])
    @pytest.mark.parametrize("betas", [0.9, (0.9,), None, ("a", "b")])
    def test_betas(self, make: Any, betas: Any) -> None:
        with pytest.raises(BadInputError, match=r"betas are .*: give two numbers in \[0, 1\)"):
            make(nn.Linear(2, 2), betas=betas)

    @pytest.mark.parametrize("make", [BlockwiseOptimizer, BaocOptimizer])
    def test_no_checkpoint(self, make: Any) -> None:
        optimizer = make(nn.Linear(2, 2))
        with pytest.raises(CheckpointError, match="no optimizer checkpoint but a NoneType"):
            optimizer.load_state_dict(None)
        saved = optimizer.state_dict()
        with pytest.raises(CheckpointError, match="lacks num_steps, state"):
            optimizer.load_state_dict({k: v for k, v in saved.items() if k not in ("num_steps", "state")})
        with pytest.raises(CheckpointError, match=r"damaged .*num_steps"):
            optimizer.load_state_dict({**saved, "num_steps": "many"})
        with pytest.raises(CheckpointError, match=r"damaged .*state of weight"):
            optimizer.load_state_dict({**saved, "state": {**saved["state"], "weight": None}})
