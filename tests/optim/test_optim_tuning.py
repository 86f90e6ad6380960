"""Rates and betas of blocks: multiples of the group's rate, betas of a rule's own, on every backend and placement."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from baoc.core.recipes import Tuning
from baoc.optim import BlockwiseOptimizer
from baoc.types import Block, ParamInfo, Role

TUNING = Tuning(lr={"adamw": 0.5, "head": 4.0}, betas={"adamw": (0.8, 0.95), "lion": (0.7, 0.9)})
SHAPE = (8, 32)
NAMES = ("a", "b", "head")
SPECS = {"a": "adamw", "b": "lion", "head": "adamw"}
ALONE = {  # what each block is to do, in words of an optimizer of its own
    "a": {"lr": 1e-2 * 0.5, "betas": (0.8, 0.95)},
    "b": {"lr": 1e-2, "betas": (0.7, 0.9)},
    "head": {"lr": 1e-2 * 2.0, "betas": (0.8, 0.95)},
}


@pytest.mark.parametrize(
    "given",
    [{"lr": {"adamw": 0.0}}, {"lr": {"head": -1.0}}, {"lr": {"adamw": float("inf")}}, {"betas": {"lion": (0.9, 1.0)}}],
)
def test_what_no_recipe_can_have_is_refused(given: dict[str, dict[str, float]]) -> None:
    with pytest.raises(ValueError, match="is of no recipe"):
        Tuning(**given)  # pyright: ignore[reportArgumentType]


def make_params() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(*SHAPE, generator=generator)) for name in NAMES}


def block(name: str, *, placement: str = "") -> Block:
    role = Role.HEAD if name == "head" else Role.MLP
    return Block(name=name, role=role, params=(ParamInfo(name=name, shape=SHAPE, dtype="float32", role=role),))


def build(params: dict[str, nn.Parameter], specs: dict[str, str] = SPECS, **given: object) -> BlockwiseOptimizer:
    given = {"lr": 1e-2, "rms_matching": False, "tuning": TUNING, **given}
    return BlockwiseOptimizer(list(params.items()), specs, blocks=[block(name) for name in params], **given)  # pyright: ignore


def gradients(num: int) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(num):
        yield {name: torch.randn(*SHAPE, generator=generator) for name in NAMES}


def steps(optimizer: BlockwiseOptimizer, params: dict[str, nn.Parameter], *, num: int = 4) -> None:
    for grads in gradients(num):
        for name, param in params.items():
            param.grad = grads[name].clone()
        optimizer.step()


def each_alone(specs: dict[str, str] = SPECS, **given: object) -> dict[str, nn.Parameter]:
    params = make_params()
    for name, param in params.items():
        own = {**ALONE[name], "rms_matching": False, **given}
        optimizer = BlockwiseOptimizer([(name, param)], {name: specs[name]}, blocks=[block(name)], **own)  # pyright: ignore
        for grads in gradients(4):
            param.grad = grads[name].clone()
            optimizer.step()
    return params


@pytest.mark.parametrize("backend", ["eager", "native", pytest.param("fused", marks=pytest.mark.slow)])
@pytest.mark.parametrize("specs", [SPECS, dict.fromkeys(NAMES, "adamw_int8")], ids=["fp32", "int8"])
def test_each_block_steps_as_an_optimizer_of_its_own_would(
    backend: str, specs: dict[str, str], request: pytest.FixtureRequest
):
    if backend == "fused":
        request.getfixturevalue("interpreted")
    tuning = TUNING if specs is SPECS else Tuning(lr={"adamw": 0.5, "head": 4.0}, betas={"adamw": (0.8, 0.95)})
    params, alone = make_params(), {}
    optimizer = build(params, specs, backend=backend, tuning=tuning)
    steps(optimizer, params)
    if specs is not SPECS:
        ALONE_INT8 = {**ALONE, "b": ALONE["a"]}
        for name in NAMES:
            one = {name: make_params()[name]}
            own = BlockwiseOptimizer(
                list(one.items()), {name: specs[name]}, blocks=[block(name)], backend=backend, rms_matching=False,
                **ALONE_INT8[name],
            )  # pyright: ignore  # fmt: skip
            steps(own, one)
            alone |= one
    else:
        alone = each_alone(specs, backend=backend)
    for name in NAMES:
        assert torch.equal(params[name], alone[name]), name
    plain = make_params()
    steps(build(plain, specs, backend=backend, tuning=None), plain)
    assert not any(torch.equal(plain[name], params[name]) for name in NAMES)


def test_blocks_on_the_host_have_their_settings_too():
    params, here = make_params(), make_params()
    steps(build(params, {name: f"{spec}@streamed" for name, spec in SPECS.items()}), params)
    steps(build(here), here)
    assert all(torch.equal(params[name], here[name]) for name in NAMES)


def test_blocks_that_are_stepped_in_backward_have_their_settings_too():
    params, here = make_params(), make_params()
    released = build(params, release=True)
    for grads in gradients(4):
        torch.stack([(params[name] * grads[name]).sum() for name in NAMES]).sum().backward()
        released.step()
    steps(build(here), here)
    for name in NAMES:
        torch.testing.assert_close(params[name], here[name], rtol=0, atol=0)


def test_without_a_tuning_nothing_is_there_to_pay_for():
    params = make_params()
    optimizer = build(params, tuning=None)
    assert len(optimizer.options()) == 1
    assert "first_betas" not in optimizer.param_groups[0]


def test_blocks_that_are_tuned_alike_share_one_row_of_settings():
    optimizer = build(make_params(), dict.fromkeys(NAMES, "adamw"))
    assert len(optimizer.options()) == 1 + 2


def test_a_schedule_moves_the_rate_that_is_multiplied():
    params = make_params()
    optimizer = build(params)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    steps(optimizer, params, num=1)
    schedule.step()
    assert sorted(options.lr for options in optimizer.options()) == pytest.approx([2.5e-3, 5e-3, 5e-3, 1e-2])


def test_a_beta_that_a_schedule_moves_is_the_schedules_and_the_other_one_stays():
    params = make_params()
    optimizer = build(params)
    assert [options.betas for options in optimizer.options()] == [(0.9, 0.999), (0.8, 0.95), (0.7, 0.9), (0.8, 0.95)]
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=10)  # it begins at a momentum of .95
    assert [options.betas for options in optimizer.options()] == [
        (0.95, 0.999),
        (0.95, 0.95),
        (0.95, 0.9),
        (0.95, 0.95),
    ]


def test_a_checkpoint_keeps_settings_by_block_and_goes_on_bit_for_bit():
    params, twin = make_params(), make_params()
    optimizer = build(params)
    steps(optimizer, params, num=3)
    saved = optimizer.state_dict()
    assert saved["blocks"]["head"]["tuned"] == {"lr": 2.0, "betas": [0.8, 0.95]}
    with torch.no_grad():
        for name in NAMES:
            twin[name].copy_(params[name])
    other = build(twin)
    other.load_state_dict(saved)
    for one, held in ((optimizer, params), (other, twin)):
        steps(one, held)
    assert all(torch.equal(params[name], twin[name]) for name in NAMES)


def test_a_checkpoint_of_another_recipe_is_converted_and_the_settings_are_those_in_force():
    params, twin = make_params(), make_params()
    optimizer = build(params, tuning=None, betas=(0.9, 0.99))
    steps(optimizer, params)
    other = build(twin, dict.fromkeys(NAMES, "adamw_int8"))
    other.load_state_dict(optimizer.state_dict())
    assert other.load_report is not None and len(other.load_report.moves) == 3
    assert other.options()[1].betas == (0.8, 0.95), "no schedule had moved the betas of the checkpoint"


def test_a_block_that_moves_to_another_rule_takes_that_rules_settings():
    params = make_params()
    optimizer = build(params)
    steps(optimizer, params)
    optimizer.migrate({"a": "lion"})
    slot = optimizer.registry.live["a"].slots[0]
    options = optimizer.options()[slot.options_index]
    assert (options.lr, options.betas) == (1e-2, (0.7, 0.9))
