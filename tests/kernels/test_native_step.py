"""The native (C++) step against the eager one: every spec it takes, odd sizes, excluded elements, late gradients."""

from collections.abc import Callable

import pytest
import torch

from baoc.core.catalogue import NATIVE
from baoc.optim import BlockwiseOptimizer
from tests.support.native_cases import LR, SETTINGS, Pair, shapes_of, stepped
from tests.support.optimizing import (
    MATRICES,
    Gradients,
    build,
    info,
    make_params,
    one_block,
    run_alike,
    through_file,
    trained,
    twin_of,
)

STEPS, FEW_STEPS = 8, 5
ADAMW = {name for name, spec in NATIVE.items() if spec.rule == "adamw"}  # between them m and v in every codec
OTHER_WEIGHTS = [
    f"{spec}+{weights}"
    for spec in ("adamw", "adamw_int8", "adamw_int4", "lion_int8", "foam_l2_int8", "adamw_shared_out_int8")
    for weights in ("split8", "bf16_sr", "bf16")
]
SOME = [
    "adamw", "adamw_int8", "adamw_int4", "rmsprop_int8_root", "lion_int8", "signum", "sign",
    "adamw_shared_in_int8", "adamw_shared_out", "foam_l1", "foam_l2_int8", "foam_l3_int8", "adamw_int8+split8",
    "lion+bf16_sr",
]  # fmt: skip
BIG = {"a": (300, 333), "b": (70001,), "c": (513, 130)}


def big_of(spec: str) -> dict[str, tuple[int, ...]]:
    needs_matrix = len(shapes_of(spec)) == len(MATRICES)
    return {name: shape for name, shape in BIG.items() if len(shape) > 1 or not needs_matrix}


pytestmark = pytest.mark.filterwarnings("ignore:16-bit weights without correction:UserWarning")


def stay_equal(pair: Pair, *, steps: int = STEPS, change: Callable[[int], None] = lambda step: None) -> None:
    """Steps both from the same states and gradients, which `change` may touch, and compares them after each."""
    for step in range(steps):
        pair.level()
        pair.give()
        change(step)
        pair.step()
        pair.check()


@pytest.mark.parametrize("spec", [*stepped("native"), *OTHER_WEIGHTS])
def test_each_of_many_steps_is_the_eager_one(spec: str):
    stay_equal(Pair(spec, shapes_of(spec)), steps=STEPS if spec in ADAMW else FEW_STEPS)


@pytest.mark.parametrize("spec", ["adamw", "adamw_int8", "adamw_int4", "lion_int8", "rmsprop_int8", "foam_l2_int8"])
def test_bf16_parameters_are_stepped_in_fp32_and_rounded_once(spec: str):
    stay_equal(Pair(spec, shapes_of(spec), dtype=torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("spec", SOME)
def test_left_to_itself_it_stays_by_the_eager_one(spec: str):
    """A code that fell on the other side is corrected by its thresholds, not added up."""
    pair = Pair(spec, shapes_of(spec))
    for _ in range(50):
        pair.give()
        pair.step()
    for name in pair.params[0]:
        off = (pair.weights(0, name) - pair.weights(1, name)).abs()
        if off.numel():
            least = 2**-8 * pair.weights(1, name).abs().max() if "+bf16" in spec else 0.0
            assert off.max() <= 2 * LR + least, name
            assert off.mean() <= 1e-3 * LR + 1e-3 * least, name


@pytest.mark.parametrize("spec", SOME)
def test_elements_without_a_finite_gradient_are_left_out(spec: str):
    pair = Pair(spec, shapes_of(spec))
    for step in range(6):
        pair.level()
        pair.give()
        before = {name: pair.weights(0, name).clone() for name in pair.params[0]}
        holes = {}
        for name in pair.params[0]:
            holes[name] = torch.rand(before[name].shape) < (0.0, 0.1, 1.0)[step % 3]
            for params in pair.params:
                grad = params[name].grad
                assert grad is not None
                grad[holes[name]] = (torch.nan, torch.inf, -1e20)[step % 3]
        pair.step()
        pair.check()
        for name, hole in holes.items():
            assert torch.equal(pair.weights(0, name)[hole], before[name][hole]), name


@pytest.mark.parametrize("spec", SOME)
def test_the_number_of_threads_does_not_change_a_bit(spec: str):
    found = []
    threads = torch.get_num_threads()
    try:
        for num in (1, 2, 3):
            torch.set_num_threads(num)
            params = make_params(big_of(spec))
            optimizer = build(params, spec, backend="native", **SETTINGS)
            torch.manual_seed(0)
            for _ in range(3):
                for param in params.values():
                    param.grad = torch.randn(param.shape).to(param.dtype)
                optimizer.step()
            found.append((params, optimizer))
    finally:
        torch.set_num_threads(threads)
    (first, one), *others = found
    for params, optimizer in others:
        for name, param in params.items():
            assert torch.equal(param, first[name])
            for key, tensor in optimizer.state[param].items():
                assert torch.equal(tensor, one.state[first[name]][key]), (name, key)


@pytest.mark.parametrize("spec", ["lion_int8", "signum", "sign", "rmsprop", "foam_l2_int8", "adamw_shared_in"])
def test_without_matching_rules_run_as_published(spec: str):
    stay_equal(Pair(spec, shapes_of(spec), rms_matching=False), steps=4)


def test_blocks_of_several_tensors_are_matched_as_one():
    shapes = {"one": (3,), "bias": (300,), "large": (65, 67), "linear": (17, 64)}
    for spec in ("lion_int8", "rmsprop_int4", "rmsprop"):
        blocks = [
            one_block("first", [info(name, shapes[name]) for name in ("one", "large")]),
            one_block("second", [info(name, shapes[name]) for name in ("bias", "linear")]),
        ]
        pair = Pair(spec, shapes, blocks=blocks)
        for step in range(6):
            pair.level()
            pair.give()
            if step == 4:  # a surge, which meets the bound on a tensor's update
                for params in pair.params:
                    params["large"].grad *= 1e3
            pair.step()
            pair.check()


def test_a_block_that_stood_still_moves_as_the_eager_one():
    pair = Pair("sign", {"a": (4000,)})
    for rate in (0.0, 0.0, 0.001, 1.0):
        pair.give()
        for params in pair.params:
            grad = params["a"].grad
            assert grad is not None
            grad *= torch.arange(4000) < rate * 4000
        pair.step()
        pair.check()


@pytest.mark.parametrize("storage", ["int8", "int8_root", "int4"])
def test_scales_follow_averages_that_shrink(storage: str):
    pair = Pair(f"adamw_{storage}", {"large": (65, 67)}, betas=(0.8, 0.9))

    def shrink(step: int) -> None:
        for params in pair.params:
            params["large"].grad *= 0.93**step

    stay_equal(pair, change=shrink)


def test_late_gradients_count_their_own_steps():
    pair = Pair("adamw_int8", {"early": (100,), "late": (70,)})

    def withhold(step: int) -> None:
        for params in pair.params:
            params["late"].grad = None if step < 5 else params["late"].grad

    stay_equal(pair, change=withhold)
    assert float(pair.native.state[pair.params[0]["late"]]["step"]) == 3


def test_gradients_of_other_strides_and_types_are_read_right():
    shape = {"a": (40, 30)}
    pair = Pair("adamw_int8", shape)

    def relay(step: int) -> None:
        grad = pair.params[1]["a"].grad
        assert grad is not None
        pair.params[0]["a"].grad = grad.t().contiguous().t() if step % 2 else grad.expand(1, 40, 30)[0]

    stay_equal(pair, steps=4, change=relay)


def test_gradients_of_fp32_for_bf16_parameters():
    pair = Pair("adamw_int8+split8", {"a": (40, 33)})
    for params in pair.params:
        if hasattr(params["a"], "grad_dtype"):
            params["a"].grad_dtype = torch.float32
    for _ in range(4):
        pair.level()
        grad = torch.randn(40, 33)
        for params in pair.params:
            params["a"].grad = grad.clone() if hasattr(params["a"], "grad_dtype") else grad.to(torch.bfloat16)
        pair.step()
        pair.check()


def test_parameter_groups_keep_their_settings():
    params = make_params({"a": (50,), "b": (50,)}), make_params({"a": (50,), "b": (50,)})
    built = []
    for named, name in zip(params, ("native", "eager"), strict=True):
        groups = [
            {"params": [("a", named["a"])], "lr": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.0},
            {"params": [("b", named["b"])], "lr": 3e-3, "eps": 1e-4, "weight_decay": 0.5},
        ]
        built.append(BlockwiseOptimizer(groups, "adamw_int8", backend=name))
    gradients = Gradients(params[0])
    for _ in range(5):
        gradients.give(*params)
        for optimizer in built:
            optimizer.param_groups[0]["lr"] *= 0.9
            optimizer.step()
    for name in params[0]:
        torch.testing.assert_close(params[0][name], params[1][name], rtol=3e-7, atol=1e-7)


def test_fp32_adamw_is_torchs_to_the_last_units():
    own, theirs = make_params(shapes_of("adamw")), make_params(shapes_of("adamw"))
    native = build(own, "adamw", backend="native", **SETTINGS)
    reference = torch.optim.AdamW(theirs.values(), foreach=False, fused=False, **SETTINGS)
    gradients = Gradients(own)
    run_alike((native, reference), (own, theirs), gradients=gradients, steps=50)
    for name, param in own.items():
        torch.testing.assert_close(param, theirs[name], rtol=2e-6, atol=2e-6)
        if param.numel():
            for key, other in (("m", "exp_avg"), ("v", "exp_avg_sq")):
                expected = reference.state[theirs[name]][other]
                torch.testing.assert_close(native.state[param][key], expected, rtol=2e-6, atol=1e-12)


def test_weights_count_as_changed_for_autograd():
    params = make_params({"a": (3,), "idle": (3,)})
    optimizer = build(params, "adamw_int8", backend="native")
    params["a"].grad = torch.ones(3)
    before = {name: param._version for name, param in params.items()}
    optimizer.step()
    assert params["a"]._version > before["a"] and params["idle"]._version == before["idle"]


def test_either_backend_takes_the_next_step_of_the_other():
    shapes = shapes_of("adamw_int8")
    first, native, gradients = trained(shapes, "adamw_int8", backend="native", **SETTINGS, steps=5)
    second = twin_of(first)
    eager = build(second, "adamw_int8", backend="eager", **SETTINGS)
    eager.load_state_dict(through_file(native.state_dict()))
    gradients.give(first, second)
    native.step()
    eager.step()
    for name, param in first.items():
        torch.testing.assert_close(param, second[name], rtol=3e-7, atol=1e-7)


def test_parameters_that_move_are_found_again():
    pair = Pair("adamw_int8", {"a": (100,), "b": (64,)})
    for step in range(4):
        pair.give()
        pair.step()
        if step == 1:
            param = pair.params[0]["b"]
            param.data = param.data.clone()
    pair.check()
