"""What a user may pass, and what each wrong input is told."""

from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from baoc.core.catalogue import NATIVE
from baoc.errors import BadInputError
from baoc.optim import BlockwiseOptimizer
from tests.support.optimizing import (
    Gradients,
    assert_same,
    build,
    info,
    make_params,
    one_block,
    run_steps,
    states_by_name,
)

SHAPES = {"a": (4, 8), "b": (8,), "c": (6, 4)}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def test_every_spelling_of_parameters_is_the_same() -> None:
    ends = []
    for spell in (
        lambda m: m,
        lambda m: m.named_parameters(),
        lambda m: m.parameters(),
        lambda m: [{"params": m.parameters()}],
        lambda m: [{"params": list(m.named_parameters()), "lr": 1e-3}],
        lambda m: [{"params": list(m.parameters()), "param_names": [n for n, _ in m.named_parameters()]}],
    ):
        model = net()
        optimizer = BlockwiseOptimizer(spell(model), "adamw_int8", lr=1e-3)
        named = dict(model.named_parameters())
        run_steps(optimizer, named, gradients=Gradients(named), steps=3)
        ends.append({n: p.detach() for n, p in named.items()})
    for end in ends[1:]:
        assert_same(ends[0], end)


def test_names_are_the_users_or_counted() -> None:
    model = net()
    assert list(BlockwiseOptimizer(model).specs) == [name for name, _ in model.named_parameters()]
    assert list(BlockwiseOptimizer(model.parameters()).specs) == [f"param{i}" for i in range(6)]


def test_keys_of_the_users_groups_are_kept_as_plain_types() -> None:
    config = OmegaConf.create({"betas": [0.8, 0.9], "extra": {"layers": [1, 2]}, "lr": 0.1})
    params = make_params(SHAPES)
    group: dict[str, Any] = {"params": list(params.items()), **{str(k): config[k] for k in config}}
    optimizer = BlockwiseOptimizer([group], betas=config.betas)
    kept = optimizer.param_groups[0]
    assert kept["betas"] == (0.8, 0.9) and type(kept["betas"]) is tuple
    assert kept["extra"] == {"layers": (1, 2)} and type(kept["extra"]) is dict
    assert type(optimizer.defaults["betas"]) is tuple and kept["lr"] == 0.1
    run_steps(optimizer, params, gradients=Gradients(params), steps=1)


def test_numbers_of_numpy_are_pythons_own_in_a_checkpoint() -> None:
    """As a schedule that computes with NumPy leaves them."""
    params = make_params(SHAPES)
    optimizer = BlockwiseOptimizer([{"params": list(params.items()), "extra": np.arange(2)}], lr=np.float32(0.5))
    optimizer.param_groups[0]["lr"] = np.float64(0.25)
    torch.save(optimizer.state_dict(), file := BytesIO())
    saved = torch.load(BytesIO(file.getvalue()), weights_only=True)["param_groups"][0]
    assert saved["lr"] == 0.25 and saved["extra"] == [0, 1] and type(optimizer.defaults["lr"]) is float


def test_keys_and_items_of_a_dict_are_in_order() -> None:
    params = make_params(SHAPES)
    assert list(BlockwiseOptimizer(params.items()).specs) == list(SHAPES)
    assert len(BlockwiseOptimizer(dict.fromkeys(params.values()).keys()).specs) == len(SHAPES)


def test_a_tied_parameter_is_updated_once() -> None:
    weight, twin = make_params({"w": (4, 8)})["w"], make_params({"w": (4, 8)})["w"]
    tied = BlockwiseOptimizer([("embedding", weight), ("head", weight)], lr=0.1)
    once = BlockwiseOptimizer([("embedding", twin)], lr=0.1)
    assert list(tied.specs) == ["embedding"] and tied.state_bytes() == once.state_bytes()
    weight.grad = twin.grad = torch.ones(4, 8)
    tied.step()
    once.step()
    assert torch.equal(weight, twin)


def test_a_block_names_the_owner_of_a_tied_parameter() -> None:
    weight = make_params({"w": (4, 8)})["w"]
    described = info("embedding", (4, 8))
    block = one_block("tied", [type(described)(**{**_fields(described), "aliases": ("head",)})])
    optimizer = BlockwiseOptimizer([("head", weight)], {"tied": "lion"}, blocks=[block])
    assert list(states_by_name(optimizer.state_dict())) == ["embedding"]


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def test_a_tied_parameter_in_two_groups_must_have_one_setting() -> None:
    weight = make_params({"w": (4, 8)})["w"]
    same = [{"params": [("a", weight)], "lr": 0.1}, {"params": [("b", weight)], "lr": 0.1}]
    assert list(BlockwiseOptimizer(same).specs) == ["a"]
    other = [{"params": [("a", weight)], "lr": 0.1}, {"params": [("b", weight)], "lr": 0.2}]
    with pytest.raises(BadInputError, match="b and a are one tied parameter in two groups with different settings"):
        BlockwiseOptimizer(other)


def test_an_empty_parameter_last_or_alone_is_no_trouble() -> None:
    for shapes in ({"a": (4, 8), "empty": (0,)}, {"empty": (0,)}, {"empty": (0, 5)}):
        for spec in ("adamw", "adamw_int8", "lion_bf16", "rmsprop_int8_root", "sign"):
            params = make_params(shapes)
            before = {n: p.detach().clone() for n, p in params.items()}
            optimizer = build(params, spec, lr=0.1)
            run_steps(optimizer, params, gradients=Gradients(params), steps=2)
            assert all(p.isfinite().all() for p in params.values())
            assert "a" not in params or not torch.equal(params["a"], before["a"])
            again = build(make_params(shapes), spec)
            again.load_state_dict(optimizer.state_dict())


class TestLateParameters:
    def test_a_thawed_parameter_gets_state_with_its_first_gradient(self) -> None:
        params = make_params(SHAPES)
        params["c"].requires_grad_(False)
        optimizer = build(params, "adamw_int8", lr=0.1)
        run_steps(optimizer, {n: params[n] for n in "ab"}, gradients=Gradients(params), steps=3)
        params["c"].requires_grad_(True)
        run_steps(optimizer, params, gradients=Gradients(params), steps=1)
        assert optimizer.specs["c"] == "adamw_int8"
        assert optimizer.state[params["c"]]["step"] == 1

    def test_what_no_plan_has_is_told_with_its_bytes(self, caplog: pytest.LogCaptureFixture) -> None:
        params = make_params(SHAPES)
        given = dict.fromkeys(params, "adamw_int8")
        late = {f"late{i}": nn.Parameter(torch.zeros(64)) for i in range(6)}
        optimizer = build(params, given)
        optimizer.add_param_group({"params": list(late.items())})
        assert "late0, late1, late2, late3 and 2 more came after the plan was made: run by adamw, with 3.02 KiB" in (
            caplog.text
        )

    def test_an_added_group_runs_the_spec_given_for_all(self) -> None:
        params = make_params(SHAPES)
        optimizer = build({"a": params["a"]}, "lion")
        optimizer.add_param_group({"params": [("b", params["b"])], "lr": 0.5})
        assert optimizer.specs == {"a": "lion", "b": "lion"} and optimizer.param_groups[1]["lr"] == 0.5
        optimizer = build({"a": params["a"]}, {"a": "lion"})
        optimizer.add_param_group({"params": [params["b"]]})
        assert optimizer.specs == {"a": "lion", "param1": "adamw"}

    @pytest.mark.parametrize("spec", ["adamw", "adamw_int8", "rmsprop", "adafactor", "lion", "sign", "foam_l2_int8"])
    @pytest.mark.parametrize("late", [101, 1000])
    def test_its_first_update_is_one_learning_rate(self, spec: str, late: int) -> None:
        params = make_params({"early": (4, 8), "late": (4, 8)})
        optimizer = build(params, spec, lr=0.1, weight_decay=0.0)
        early, generator = params["early"], torch.Generator().manual_seed(0)
        for _ in range(late):
            early.grad = torch.randn(4, 8, generator=generator)
            optimizer.step()
        before = params["late"].detach().clone()
        early.grad, params["late"].grad = None, torch.randn(4, 8, generator=generator)
        optimizer.step()
        moved = float((params["late"].detach() - before).square().mean().sqrt())
        expected = 0.1 if spec.startswith("adamw") else 0.1 * 0.2  # AdamW's first update, or the matched RMS
        assert moved == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_are_warned_of_once_with_their_blocks(dtype: torch.dtype) -> None:
    with pytest.warns(UserWarning, match=r"stand still\. Block\(s\): a, b, c\. Keep weights in fp32") as caught:
        optimizer = build(make_params(SHAPES, dtype=dtype))
        params = {n: p for g in optimizer.param_groups for n, p in zip(g["param_names"], g["params"], strict=True)}
        run_steps(optimizer, params, gradients=Gradients(params), steps=2)
    assert len(caught) == 1


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("backend", ["eager", "native"])
def test_weights_that_are_cast_to_16_bits_later_are_warned_of_once(backend: str, steps: int) -> None:
    params = make_params(SHAPES)
    optimizer = build(params, "adamw_int8", backend=backend)
    run_steps(optimizer, params, gradients=Gradients(params), steps=steps)
    for param in params.values():
        param.data, param.grad = param.data.bfloat16(), torch.ones_like(param, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=r"stand still\. Block\(s\): a, b, c\. Keep weights in fp32") as caught:
        optimizer.step()
        optimizer.step()
    assert len(caught) == 1


@pytest.mark.filterwarnings("ignore:16-bit weights")
@pytest.mark.parametrize("spec", ["adamw", "adamw_int8", "sign", "adafactor", "foam_l1"])
def test_16_bit_weights_are_updated_in_fp32_and_rounded_once(spec: str) -> None:
    shapes = {"a": (4, 8), "c": (6, 4)}
    low = make_params(shapes, dtype=torch.bfloat16)
    high = {n: nn.Parameter(p.detach().float()) for n, p in low.items()}
    a, b = build(low, spec, lr=0.1), build(high, spec, lr=0.1)
    for name, grad in Gradients(high).next().items():
        low[name].grad = grad.to(torch.bfloat16)
        high[name].grad = low[name].grad.float()
    a.step()
    b.step()
    for name in shapes:
        assert torch.equal(low[name], high[name].to(torch.bfloat16))


def test_float64_weights_keep_their_precision() -> None:
    params = make_params({"w": (4, 8)}, dtype=torch.float64)
    before = params["w"].detach().clone()
    for spec in ("adamw", "sign", "adafactor"):
        run_steps(build(params, spec, lr=1e-12, weight_decay=0.0), params, gradients=Gradients(params), steps=1)
    assert 0 < (params["w"] - before).abs().max() < 1e-11


@pytest.mark.parametrize("spec", NATIVE)
@pytest.mark.parametrize("layout", ["transposed", "channels_last"])
def test_other_memory_layouts_end_where_contiguous_ones_do(spec: str, layout: str) -> None:
    def make() -> nn.Parameter:
        generator = torch.Generator().manual_seed(0)
        if layout == "transposed":
            return nn.Parameter(torch.randn(13, 40, generator=generator).t())
        return nn.Parameter(torch.randn(6, 5, 3, 3, generator=generator).contiguous(memory_format=torch.channels_last))

    strided, plain = make(), nn.Parameter(make().detach().clone(memory_format=torch.contiguous_format))
    strides = strided.stride()
    optimizers = [build({"w": weight}, spec, lr=1e-2) for weight in (strided, plain)]
    gradients = Gradients({"w": plain})
    for _ in range(5):
        gradients.give({"w": strided}, {"w": plain})
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(strided.detach(), plain.detach(), rtol=1e-6, atol=1e-6)
    assert strided.stride() == strides
