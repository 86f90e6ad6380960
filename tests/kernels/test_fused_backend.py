"""The fused backend of BlockwiseOptimizer against the eager one over several steps, interpreted on the CPU."""

import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn

from baoc.kernels.triton import engine
from tests.support.fused_pair import MIXED, SHAPES, SMALL, Pair, dump, poison
from tests.support.interpreting import interpreted
from tests.support.optimizing import Gradients, build, info, make_params, one_block, run_steps, through_file
from tests.support.step_files import MOST, entered

ELEMENTWISE = ("adamw_bf16", "rmsprop", "rmsprop_int8_root", "lion_int8", "signum", "sign")
WEIGHTS = ("adamw_int8+split8", "lion+bf16_sr", "adamw_bf16+bf16_sr")


def test_without_a_gpu_it_is_eager_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    params = make_params(SMALL)
    optimizer = build(params, backend="fused")
    Gradients(params).give(params)
    optimizer.step()
    assert {choice.backend for choice in optimizer.registry.choices.values()} == {"eager"}
    assert "a (fused: Triton steps parameters on NVIDIA GPUs only)" in caplog.text


@interpreted
@pytest.mark.parametrize("spec", ELEMENTWISE)
def test_every_spec_follows_the_eager_backend(spec: str) -> None:
    pair = Pair(spec)
    pair.run(3)
    pair.check()
    assert {choice.backend for choice in pair.fused.registry.choices.values()} == {"fused"}


@interpreted
@pytest.mark.parametrize("spec", ["adamw_int8", "lion_int8+split8", "adafactor"])
def test_a_step_is_read_in_six_files(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU from the third step on, where a CUDA graph is replayed in place of what is launched."""
    params = make_params({"a": (40, 30), "b": (24, 36)})
    optimizer = build(params, spec, backend="fused")
    gradients = Gradients(params)
    run_steps(optimizer, params, gradients=gradients, steps=2)
    monkeypatch.setattr(engine.Graphs, "run", lambda *_, **__: None)
    monkeypatch.setattr(optimizer.registry.backends[0].engine.graphs, "on", True)
    gradients.give(params)
    with entered() as found:
        optimizer.step()
    assert {"optimizer.py", "nonfinite.py", "backends/fused.py", "kernels/triton/engine.py"} <= found
    assert len(found) <= MOST, sorted(found)


@interpreted
@pytest.mark.parametrize("spec", WEIGHTS)
def test_weights_other_than_native_follow_too(spec: str) -> None:
    """Numbers kept in bf16 alone may be one of theirs apart, 1/128 of the weight, where rounding goes two ways."""
    pair = Pair(spec, SMALL)
    pair.run(6)
    pair.check(steps=3.0 if "sr" in spec else 0.3)
    assert all(param.dtype is torch.bfloat16 for param in pair.params[0].values())
    assert {choice.backend for choice in pair.fused.registry.choices.values()} == {"fused"}
    same = (pair.params[0]["a"] == pair.params[1]["a"]).double().mean()
    assert same > 0.9, f"{same:.2f} of the bf16 weights are the same"


@interpreted
@pytest.mark.parametrize("spec", ["adamw_shared_in", "adafactor", "foam_l2_int8"])
def test_rules_that_see_a_matrix_are_stepped_through_the_same_engine(spec: str) -> None:
    pair = Pair({"a": spec, "b": "adamw", "c": spec, "m": "lion"}, {**SMALL, "c": (4, 65), "m": (5, 7)})
    for step in range(4):
        pair.give()
        if step == 2:
            for params in pair.params:
                poison(params)
        pair.step()
    pair.check()
    assert {choice.backend for choice in pair.fused.registry.choices.values()} == {"fused"}


@interpreted
def test_a_mixed_plan_with_blocks_of_many_tensors() -> None:
    blocks = [
        one_block("first", [info("a", (9, 37)), info("b", (40,))]),
        one_block("second", [info("c", (4, 65)), info("empty", (0,)), info("one", (1,))]),
        one_block("third", [info("d", (3, 5, 7))]),
    ]
    pair = Pair({"first": "rmsprop", "second": "rmsprop", "third": "signum_int8"}, blocks=blocks)
    pair.run(4)
    pair.check()
    engine = pair.fused.registry.backends[0].engine
    assert len(engine.tables) == 2 and len(engine.matches) == 3


@interpreted
def test_a_block_steps_bit_for_bit_as_it_does_alone() -> None:
    """Codecs of several tables share what is uploaded, and a table's neighbours must not matter."""
    together, left = Pair(MIXED), []
    given = [together.gradients.next() for _ in range(2)]  # the first from states of nothing, the second from others
    start = {name: param.detach().clone() for name, param in together.params[0].items()}
    for pairs in ([Pair({name: MIXED[name]}, {name: SHAPES[name]}) for name in MIXED], [together]):
        left.append({})
        for pair in pairs:
            for name, param in pair.params[0].items():
                param.data.copy_(start[name])
            for grads in given:
                for name, param in pair.params[0].items():
                    param.grad = grads[name].clone()
                pair.fused.step()
            left[-1] |= dump(pair.fused, pair.params[0])
    alone, mixed = left
    assert alone.keys() == mixed.keys()
    assert [key for key, value in alone.items() if not torch.equal(value, mixed[key])] == []


@interpreted
def test_mixed_specs_and_schedulers_that_write_lr_and_betas() -> None:
    pair = Pair(MIXED)
    for step in range(4):
        for optimizer in (pair.fused, pair.eager):
            optimizer.param_groups[0]["lr"] = 1e-2 * (1 + step) / 4
            optimizer.param_groups[0]["betas"] = (0.85 + 0.025 * step, 0.99)
        pair.run(1)
    pair.check()


@interpreted
def test_late_and_missing_gradients_count_their_own_steps() -> None:
    pair = Pair(MIXED)
    for step in range(6):
        pair.give()
        for params in pair.params:
            if step < 3:
                params["a"].grad = params["c"].grad = None
            if step % 3:
                params["b"].grad = None
        before = {name: param._version for name, param in pair.params[0].items()}
        pair.step()
        pair.check()
        # A backward that still needs the weights of before is told, as torch's own steps tell it.
        written = {name for name, param in pair.params[0].items() if param._version > before[name]}
        given = [name for name, param in pair.params[0].items() if param.grad is not None and param.numel()]
        matrices = {name for name in given if pair.params[0][name].ndim > 1}
        assert written == (matrices or set(given))
    assert pair.fused.state[pair.params[0]["a"]]["step"] == 3 and pair.fused.state[pair.params[0]["b"]]["step"] == 2


@interpreted
def test_a_first_gradient_after_many_steps_moves_one_learning_rate() -> None:
    pair = Pair("adamw_int8", {"a": (40,), "b": (40,)}, weight_decay=0.0)
    for step in range(16):  # counted along with `a`, the update would be halved: sqrt(1 - .999^16) / (1 - .9^16) / 1.3
        pair.give()
        if step < 15:
            for params in pair.params:
                params["b"].grad = None
        before = pair.params[0]["b"].detach().clone()
        pair.step()
    torch.testing.assert_close((pair.params[0]["b"] - before).abs(), torch.full((40,), 1e-2), rtol=1e-2, atol=1e-4)


@interpreted
def test_several_groups_and_late_parameters() -> None:
    pair = Pair("rmsprop", SMALL)
    late = nn.Parameter(torch.ones(33)), nn.Parameter(torch.ones(33))
    pair.run(2)
    for optimizer, param in zip((pair.fused, pair.eager), late, strict=True):
        optimizer.add_param_group({"params": [("late", param)], "lr": 3e-3, "weight_decay": 0.0, "betas": (0.5, 0.9)})
    for params, param in zip(pair.params, late, strict=True):
        params["late"] = param
    pair.gradients = Gradients(pair.params[0])
    pair.run(3)
    pair.check()


# -- matching -------------------------------------------------------------------------------------------------


@interpreted
def test_matching_can_be_off() -> None:
    pair = Pair(MIXED, rms_matching=False)
    pair.run(3)
    pair.check()


@interpreted
def test_surges_and_blocks_that_stood_still_are_treated_alike() -> None:
    one = torch.zeros(9, 37)
    one[0, 0] = 1.0
    for spec in ("sign", "rmsprop_int8"):
        pair = Pair(spec, {"a": (9, 37)}, weight_decay=0.0)
        for grad in (torch.zeros(9, 37), one, torch.ones(9, 37), 1e3 * torch.randn(9, 37), torch.ones(9, 37)):
            for params in pair.params:
                params["a"].grad = grad.clone()
            pair.step()
            pair.check(steps=0.02)


# -- changes between steps ------------------------------------------------------------------------------------


@interpreted
def test_migration_between_steps() -> None:
    pair = Pair(MIXED)
    pair.run(2)
    for optimizer in (pair.fused, pair.eager):
        optimizer.migrate({"a": "rmsprop_int8", "b": "adamw", "c": "adamw_int8", "d": "sign"})
    pair.run(2)
    pair.check()
    for optimizer in (pair.fused, pair.eager):
        optimizer.migrate({"a": "lion"})
    pair.run(1)
    pair.check()


@interpreted
def test_checkpoints_go_between_backends() -> None:
    pair = Pair(MIXED)
    pair.run(2)
    saved = [through_file(optimizer.state_dict()) for optimizer in (pair.fused, pair.eager)]
    pair.run(1)  # goes on elsewhere, then back
    pair.fused.load_state_dict(saved[1])
    pair.eager.load_state_dict(saved[0])
    for params in zip(*(p.values() for p in pair.params), strict=True):
        params[0].data.copy_(params[1].data)
    pair.run(2)
    pair.check()
    assert pair.fused.state[pair.params[0]["a"]]["step"] == 4


@interpreted
def test_an_engine_that_is_dropped_lets_go_of_old_states_at_once() -> None:
    """Without Python's collector, which comes when it likes: memory would hold two plans until then."""
    pair = Pair("adamw_int8", SMALL)
    pair.run(1)
    kept = weakref.ref(pair.fused.state[pair.params[0]["a"]]["m"].untyped_storage())
    gc.collect()
    gc.disable()
    try:
        pair.fused.migrate({"a": "sign"})
        pair.fused.migrate({"a": "lion"})
        assert kept() is None
    finally:
        gc.enable()


@interpreted
@pytest.mark.parametrize("how", ["deepcopy", "save"])
def test_copies_go_on_by_themselves(how: str) -> None:
    pair = Pair(MIXED)
    pair.run(3)
    if how == "deepcopy":
        params, optimizer = copy.deepcopy((pair.params[0], pair.fused))
    else:
        buffer = io.BytesIO()
        torch.save((pair.params[0], pair.fused), buffer)
        buffer.seek(0)
        params, optimizer = torch.load(buffer, weights_only=False)
    kept = dump(optimizer, params)
    assert all(torch.equal(value, dump(pair.fused, pair.params[0])[key]) for key, value in kept.items())
    pair.give()
    for name, param in params.items():
        param.grad = None if pair.params[0][name].grad is None else pair.params[0][name].grad.clone()
    pair.step()
    assert all(torch.equal(value, kept[key]) for key, value in dump(optimizer, params).items())
    optimizer.step()
    assert all(
        torch.equal(value, dump(pair.fused, pair.params[0])[key]) for key, value in dump(optimizer, params).items()
    )
    pair.check()


@interpreted
def test_step_counts_may_be_written_to() -> None:
    pair = Pair("adamw", SMALL)
    pair.run(2)
    for optimizer, params in zip((pair.fused, pair.eager), pair.params, strict=True):
        optimizer.state[params["b"]]["step"].fill_(50)
    pair.run(2)
    pair.check()
    assert pair.fused.state[pair.params[0]["b"]]["step"] == 52 and pair.fused.state[pair.params[0]["a"]]["step"] == 4


@interpreted
def test_the_ledger_is_the_same() -> None:
    pair = Pair(MIXED)
    pair.run(2)
    assert pair.fused.block_state_bytes() == pair.eager.block_state_bytes()
