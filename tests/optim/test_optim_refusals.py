"""What cannot be optimized is refused when it is built, with what is allowed and what to do."""

from dataclasses import replace
from math import nan
from typing import Any

import pytest
import torch
from torch import nn

from baoc.errors import BadInputError
from baoc.optim import BlockwiseOptimizer, groups
from baoc.optim.groups import single_block
from baoc.optim.rules import RULES, Rule
from baoc.types import OptimizerSpec, Role
from tests.support.optimizing import build, info, make_params, one_block

SHAPES = {"a": (4, 8), "b": (8,), "c": (6, 4)}


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def test_nothing_to_train() -> None:
    with pytest.raises(BadInputError, match="got no parameters: pass a module"):
        BlockwiseOptimizer([])


def test_not_a_tensor() -> None:
    with pytest.raises(BadInputError, match="param0 is a str, not a tensor"):
        BlockwiseOptimizer(["w"])
    with pytest.raises(BadInputError, match="was given a set, which has another order in each process: give a list"):
        BlockwiseOptimizer({nn.Parameter(torch.zeros(3))})
    with pytest.raises(BadInputError, match="weight has no shape yet, as its layer is lazy: run one batch through"):
        BlockwiseOptimizer(nn.LazyLinear(3))


def test_an_expanded_parameter() -> None:
    wide = nn.Parameter(torch.zeros(1, 8).expand(4, 8))
    with pytest.raises(BadInputError, match=r"w is expanded .* register the tensor before expanding"):
        BlockwiseOptimizer([("w", wide)])


def test_a_computed_tensor() -> None:
    with pytest.raises(BadInputError, match="w is not a leaf tensor"):
        BlockwiseOptimizer([("w", nn.Parameter(torch.zeros(3)) * 2)])


def test_integers_and_complex_numbers() -> None:
    with pytest.raises(BadInputError, match=r"w is torch\.complex64: .*float64\. Keep a complex one as torch\.view_as"):
        BlockwiseOptimizer([("w", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))])


def test_two_parameters_of_one_name() -> None:
    with pytest.raises(BadInputError, match="two parameters are called 'w'"):
        BlockwiseOptimizer([("w", nn.Parameter(torch.zeros(3))), ("w", nn.Parameter(torch.zeros(3)))])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lr": -1.0}, "lr is -1.0: give a finite number of at least 0"),
        ({"lr": 1e38}, r"lr is 1e\+38: give a finite number of at least 0 and at most 1e\+30"),
        ({"lr": 10**400}, "^lr is .{,60}: give a finite"),
        (
            {"eps": 1e-45},
            "eps is 1e-45, so weights whose gradient has always been 0 .* give at least 1.18e-38, such as",
        ),
        ({"betas": (0.9, 1.0)}, r"betas are \(0.9, 1.0\): give two numbers in \[0, 1\)"),
        ({"eps": -1e-8}, "eps is -1e-08"),
        ({"eps": 0.0}, "eps is 0, so weights whose gradient has always been 0 would become 0/0.*such as 1e-8"),
        ({"lr": float("inf")}, "lr is inf: give a finite number"),
        ({"weight_decay": float("nan")}, "weight_decay is nan"),
        ({"nonfinite": "ignore"}, "policy for non-finite gradients 'ignore'.*skip_element, skip_step, raise"),
        ({"backend": "magic"}, "optimizer backend 'magic'.*auto, eager"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(BadInputError, match=text):
        build(make_params(SHAPES), **settings)


@pytest.mark.parametrize("key", ["amsgrad", "maximize", "differentiable"])
def test_switches_that_no_rule_has(key: str) -> None:
    with pytest.raises(BadInputError, match=f"sets {key}=True, which no rule here has"):
        BlockwiseOptimizer([{"params": [("w", nn.Parameter(torch.zeros(3)))], key: True}])


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [("lr", nan, "lr is nan"), ("eps", 0.0, "eps is 0"), ("betas", (1.0, 0.999), r"betas are \(1.0, 0.999\)")],
)
def test_settings_that_a_schedule_made_so(key: str, value: Any, text: str) -> None:
    params = make_params({"w": (3,)})
    optimizer = build(params)
    params["w"].grad = torch.ones(3)
    optimizer.param_groups[0][key] = value
    before = params["w"].detach().clone()
    with pytest.raises(BadInputError, match=text):
        optimizer.step()
    assert torch.equal(params["w"], before)
    optimizer.param_groups[0] |= {"lr": 1e-3, "eps": 1e-8, "betas": (0.9, 0.999)}
    optimizer.step()
    assert not torch.equal(params["w"], before) and optimizer.state[params["w"]]["step"] == 1


def test_a_step_that_was_refused_leaves_out_the_same_elements_when_it_is_made() -> None:
    params = make_params({"w": (3,)})
    optimizer = BlockwiseOptimizer(params.items(), "adamw")
    params["w"].grad = torch.tensor([nan, 1.0, 1.0])
    before = params["w"].detach().clone()
    optimizer.param_groups[0]["lr"] = nan
    with pytest.raises(BadInputError, match="lr is nan"):
        optimizer.step()
    assert optimizer.state_dict()["num_steps"] == 0
    optimizer.param_groups[0]["lr"] = 1e-3
    optimizer.step()
    assert (params["w"] == before).tolist() == [True, False, False] and optimizer.num_nonfinite == 1


def test_keys_of_a_group_that_are_nearly_a_setting() -> None:
    (param,) = make_params({"w": (3,)}).values()
    with pytest.raises(BadInputError, match=r"sets weigth_decay, which nothing .*: did you mean weight_decay\?"):
        BlockwiseOptimizer([{"params": [param], "weigth_decay": 0.0}])
    own = {"lr_scale": 0.5, "initial_lr": 1e-3, "name": "head", "wd": 1}
    own |= dict.fromkeys(["weight_decay_mult", "weight_decay_scale", "base_weight_decay", "no_weight_decay"], 0.5)
    assert own.items() <= BlockwiseOptimizer([{"params": [param], **own}]).param_groups[0].items()


def test_coupled_weight_decay() -> None:
    adam = torch.optim.Adam([nn.Parameter(torch.zeros(3))], weight_decay=0.1)
    with pytest.raises(BadInputError, match="asks for coupled weight decay"):
        BlockwiseOptimizer(adam.param_groups)


def test_unknown_specs_rules_and_storages() -> None:
    for nothing in (None, ["adamw"]):
        with pytest.raises(BadInputError, match=r"specs is .*: give the name of one for all blocks, or a dict of"):
            build(make_params(SHAPES), nothing)  # pyright: ignore[reportArgumentType]
    with pytest.raises(BadInputError, match=r"no optimizer spec is called 'adamw_int9' \(close: adamw_int8"):
        build(make_params(SHAPES), "adamw_int9")
    with pytest.raises(BadInputError, match="no update rule 'adam'"):
        build(make_params(SHAPES), OptimizerSpec(name="mine", description="", rule="adam"))
    with pytest.raises(BadInputError, match="no storage 'int3'"):
        build(make_params(SHAPES), OptimizerSpec(name="mine", description="", rule="adamw", storage="int3"))


def test_a_spec_that_does_not_apply() -> None:
    with pytest.raises(BadInputError, match=r"b cannot run foam_l2: foam_l2 needs matrices, b has shape \(8,\)\. Give"):
        build(make_params(SHAPES), "foam_l2")


def test_specs_for_other_blocks() -> None:
    with pytest.raises(BadInputError, match="no block 'd'"):
        build(make_params(SHAPES), {"a": "adamw", "b": "adamw", "c": "adamw", "d": "adamw"})
    with pytest.raises(BadInputError, match=r"no spec was given for block\(s\) b, c"):
        build(make_params(SHAPES), {"a": "adamw"})


def test_blocks_that_do_not_fit_the_parameters() -> None:
    params = make_params(SHAPES)
    blocks = [one_block(name, [info(name, shape)]) for name, shape in SHAPES.items()]
    with pytest.raises(BadInputError, match="no block has c: every trainable parameter needs one"):
        build(params, blocks=blocks[:2])
    with pytest.raises(BadInputError, match="block d has d, which the optimizer was not given"):
        build(params, blocks=[*blocks, one_block("d", [info("d", (3,))])])
    with pytest.raises(BadInputError, match="a is in two blocks, one of them twice"):
        build(params, blocks=[*blocks, one_block("twice", [info("a", (4, 8))])])
    with pytest.raises(BadInputError, match=r"a has shape \(4, 8\), its block says \(8, 4\)"):
        build(params, blocks=[one_block("a", [info("a", (8, 4))]), *blocks[1:]])


def test_a_sparse_gradient() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = BlockwiseOptimizer(embedding)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(BadInputError, match=r"weight has a sparse gradient: .* step it by torch\.optim\.SparseAdam"):
        optimizer.step()


def test_a_rule_for_hidden_layers_only() -> None:
    described = RULES["sign"].info
    RULES["hidden"] = Rule(replace(described, name="hidden", hidden_only=True))
    try:
        spec = OptimizerSpec(name="hidden", description="", rule="hidden")
        head = type(one_block("x", []))(name="head", params=(info("w", (4, 8)),), role=Role.HEAD)
        with pytest.raises(BadInputError, match="hidden is for hidden matrices, not for the head"):
            groups.check_applies(spec, block=head)
    finally:
        del RULES["hidden"]


def test_arithmetic_that_asks_no_other_rank_for_its_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Rule(replace(RULES["column_norm"].info, name="alone"))
    monkeypatch.setitem(RULES, "alone", alone)
    spec = OptimizerSpec(name="alone", description="", rule="alone")
    whole = info("w", (4, 8))
    groups.check_applies(spec, block=single_block(whole))
    with pytest.raises(
        BadInputError, match=r"alone: fully_shard cuts w, and Rule takes sums over .* from .*SummingRule"
    ):
        groups.check_applies(spec, block=single_block(replace(whole, whole=whole.shape)))


def test_placements_that_do_not_exist() -> None:
    spec = OptimizerSpec(name="far", description="", rule="adamw", placement="moon")
    with pytest.raises(BadInputError, match=r"placement.*'moon'.*device.*host_streamed"):
        build(make_params({"w": (4, 8)}), spec)


def test_a_step_in_a_graph_of_the_user_s_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_params({"w": (3,)})
    optimizer = BlockwiseOptimizer(params.items(), "adamw")
    params["w"].grad = torch.ones(3)
    for asked in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, asked, lambda: True)
    with pytest.raises(BadInputError, match=r"a CUDA graph cannot capture the step: .* Capture forward and backward"):
        optimizer.step()
    with pytest.raises(BadInputError, match="a CUDA graph cannot capture the step"):
        optimizer.mask_nonfinite()  # a replay would send addresses that the host has not counted
    monkeypatch.undo()
    optimizer.step()
    assert optimizer.state_dict()["num_steps"] == 1
