"""Update RMS matching: what a block's update measures, step by step."""

import pytest
import torch
from torch import Tensor

from baoc.core.catalogue import NATIVE
from baoc.optim import matching
from baoc.optim.backends import eager
from baoc.optim.rules import RULES
from baoc.profiling.tracker import MemoryTracker
from tests.support.matched import LR, copies, last_rms_of, moved_rms
from tests.support.optimizing import MATRICES, Gradients, build, info, make_params, one_block, run_steps, shapes_for

MATCHED = [name for name, spec in NATIVE.items() if RULES[spec.rule].info.matched]


def one_block_optimizer(params: dict[str, Tensor], spec: str, **settings: object):
    block = one_block("all", [info(name, tuple(p.shape)) for name, p in params.items()])
    return build(params, {"all": spec}, blocks=[block], lr=LR, weight_decay=0.0, **settings)


@pytest.mark.parametrize("spec", MATCHED)
def test_first_update_has_exactly_the_target(spec: str) -> None:
    params = make_params({n: s for n, s in shapes_for(spec).items() if n != "empty"})
    optimizer = one_block_optimizer(params, spec)
    before = copies(params)
    run_steps(optimizer, params, gradients=Gradients(params), steps=1)
    assert moved_rms(params, before) == pytest.approx(matching.DEFAULT_TARGET, rel=1e-3)  # weights round it at 1e-5


@pytest.mark.parametrize("spec", MATCHED)
def test_later_updates_use_the_rms_of_the_step_before(spec: str) -> None:
    """Against the same rule unmatched: the second update is the unmatched one times target / first own RMS."""
    shapes = {n: s for n, s in MATRICES.items() if n != "position"}
    matched, free = make_params(shapes), make_params(shapes)
    ours, published = one_block_optimizer(matched, spec), one_block_optimizer(free, spec, rms_matching=False)
    gradients = Gradients(matched)
    own = []
    for _ in range(4):
        gradients.give(matched, free)
        before = copies(matched), copies(free)
        ours.step()
        published.step()
        own.append(moved_rms(free, before[1]))
        factor = matching.DEFAULT_TARGET / (own[-2] if len(own) > 1 else own[-1])
        assert moved_rms(matched, before[0]) == pytest.approx(own[-1] * factor, rel=2e-3)


@pytest.mark.parametrize("spec", MATCHED)
def test_a_block_steps_with_the_temporaries_of_one_of_its_tensors(spec: str) -> None:
    """As plans count them: the update of one tensor is gone before that of the next one is made."""
    held: list[int] = []
    for count in (1, 3):
        params = make_params({f"layers.0.mlp.{n}.weight": (64, 64) for n in range(count)})
        optimizer = one_block_optimizer(params, spec)
        Gradients(params).give(params)
        with MemoryTracker().count_existing(*params.values(), *(param.grad for param in params.values())) as tracker:
            for _ in range(2):
                tracker.reset_peak()
                optimizer.step()
            held.append(tracker.peak_bytes - tracker.current_bytes)
    assert held[1] <= held[0] + 64 * count  # what is measured of each


def test_fp32_and_8_bit_adamw_have_no_factor() -> None:
    for spec in ("adamw", "adamw_bf16", "adamw_int8", "adamw_int8_root"):
        ends = []
        for on in (True, False):
            params = make_params(MATRICES)
            optimizer = build(params, spec, rms_matching=on)
            run_steps(optimizer, params, gradients=Gradients(params), steps=5)
            assert all(live.match is None for live in optimizer.registry.live.values())
            ends.append(copies(params))
        assert all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0])


def test_the_last_rms_of_adamw_is_that_of_its_last_step() -> None:
    params = make_params(MATRICES)
    optimizer = one_block_optimizer(params, "adamw")
    assert last_rms_of(optimizer, "all") is None
    gradients = Gradients(params)
    for _ in range(5):
        before = copies(params)
        run_steps(optimizer, params, gradients=gradients, steps=1)
        assert last_rms_of(optimizer, "all") == pytest.approx(moved_rms(params, before), rel=2e-3)


def test_a_surge_is_held_to_an_rms_of_one_learning_rate() -> None:
    """A block whose gradient was nearly all zero, and then is not (a gate that opens)."""
    params = make_params({"w": (16, 32)})
    optimizer = build(params, "sign", lr=LR, weight_decay=0.0)
    weight = params["w"]
    one = torch.zeros(16, 32)
    one[0, 0] = 1.0
    for grad in (one, torch.ones(16, 32)):
        before = copies(params)
        weight.grad = grad
        optimizer.step()
    assert moved_rms(params, before) == pytest.approx(1.0, rel=1e-3)
    before = copies(params)
    weight.grad = torch.ones(16, 32)
    optimizer.step()
    assert moved_rms(params, before) == pytest.approx(0.2, rel=1e-3)


def test_a_block_that_stood_still_starts_at_its_target() -> None:
    params = make_params({"w": (16, 32)})
    optimizer = build(params, "sign", lr=LR, weight_decay=0.0)
    for grad, expected in ((torch.zeros(16, 32), 0.0), (torch.ones(16, 32), 0.2), (torch.ones(16, 32), 0.2)):
        before = copies(params)
        params["w"].grad = grad
        optimizer.step()
        assert moved_rms(params, before) == pytest.approx(expected, rel=1e-3)


def test_steps_without_gradients_do_not_touch_the_measurement() -> None:
    params = make_params({"a": (4, 8), "b": (4, 8)})
    optimizer = one_block_optimizer(params, "rmsprop")
    run_steps(optimizer, params, gradients=Gradients(params), steps=3)
    match = optimizer.registry.live["all"].match
    assert match is not None
    kept = match.clone()
    for param in params.values():
        param.grad = None
    optimizer.step()
    assert torch.equal(match, kept)


@pytest.mark.parametrize(
    ("target", "own", "norm"), [(0.2, 0.5, 3.0), (0.2, 0.01, 8.0), (0.2, 0.0, 3.0), (1.5, 0.5, 20.0), (0.2, 0.5, 0.0)]
)
def test_factors_on_a_device_are_those_on_the_cpu(target: float, own: float, norm: float) -> None:
    match = torch.tensor([target, own])
    on_cpu = eager.matching_factor(match, norm=norm, count=64)
    on_device = eager.matching_factor(match, norm=torch.tensor(norm), count=64)
    assert isinstance(on_device, Tensor) and isinstance(on_cpu, float)
    assert norm == 0 or float(on_device) == pytest.approx(on_cpu, rel=1e-5)
    assert on_device.isfinite()


def test_the_norm_of_many_elements_is_exact() -> None:
    update = torch.full((5_000_000,), 0.1)
    norm, count = eager.update_norm(update, divisor=2.0, finite=None)
    assert count == 5_000_000
    assert norm == pytest.approx(0.05 * count**0.5, rel=1e-4)
