"""Moving blocks between specs: what is inherited, how large the next update is, what memory it takes."""

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from baoc.core.catalogue import NATIVE
from baoc.optim import BlockwiseOptimizer, codecs, inherit, migrate, seeding
from baoc.optim.migrate import (
    SEED_AGE,
    ConversionReport,
    convert,
    device_growth,
    norm_over_ranks,
    sums_over_all_rows,
)
from baoc.optim.rules import RULES
from baoc.optim.state import LiveBlock, allocate, make_slot, slot_with_spec
from baoc.planning.cost import state_bytes
from baoc.profiling.tracker import PeakMeter
from baoc.types import BlockMove, Moments, StateDecl, StateKind, StateLayout
from tests.support.matched import last_rms_of
from tests.support.optimizing import (
    Gradients,
    assert_same,
    build,
    info,
    make_params,
    one_block,
    run_steps,
    state_tensors,
    trained,
)
from tests.support.ranks import group
from tests.support.tolerances import CONTINUITY_ADAMW, CONTINUITY_MATCHED

SHAPES = {"linear": (17, 64), "conv": (8, 3, 3, 5)}
LR, STEPS = 1e-2, 40
BETAS = (0.9, 0.999)


class Run:
    """A block trained for some steps, with the moments a profile would have of it; `fork` copies it."""

    def __init__(self, spec: str, *, steps: int = STEPS, shapes: dict[str, tuple[int, ...]] = SHAPES):
        self.params = make_params(shapes)
        described = [info(name, shape) for name, shape in shapes.items()]
        self.optimizer = build(
            self.params, {"all": spec}, blocks=[one_block("all", described)], lr=LR, weight_decay=0.0
        )
        self.gradients = Gradients(self.params, signal=0.1)
        squares = {name: torch.zeros(shape) for name, shape in shapes.items()}
        self.last_rms = 0.0
        for _ in range(steps):
            self.last_rms = self.step()
            for name, param in self.params.items():
                assert param.grad is not None
                squares[name] += param.grad.square() / steps
        matrices = {d.name: squares[d.name].reshape(d.matrix_shape) for d in described if d.matrix_shape}
        self.moments = {name: Moments(row=m.mean(1), col=m.mean(0)) for name, m in matrices.items()}

    def step(self) -> float:
        """One step; returns the RMS of what it did, before the learning rate."""
        before = {name: p.detach().clone() for name, p in self.params.items()}
        run_steps(self.optimizer, self.params, gradients=self.gradients, steps=1)
        moved = sum(float((p.detach() - before[n]).double().square().sum()) for n, p in self.params.items())
        return (moved / sum(p.numel() for p in self.params.values())) ** 0.5 / LR

    def fork(self) -> "Run":
        other = copy.deepcopy(self)
        assert other.optimizer.state is not self.optimizer.state
        return other

    def move(self, spec: str, *, moments: bool = True) -> BlockMove:
        (move,) = self.optimizer.migrate({"all": spec}, moments=self.moments if moments else None, why="test")
        return move

    def state(self, name: str = "linear") -> dict[str, Tensor]:
        return self.optimizer.state[self.params[name]]

    def decoded(self, state: str, name: str = "linear") -> Tensor:
        slots = [slot for live in self.optimizer.registry.live.values() for slot in live.slots if slot.name == name]
        kept = next(kept for kept in slots[0].states if kept.decl.name == state)
        return kept.decode(self.state(name))

    def debiased(self, state: str, beta: float) -> Tensor:
        return self.decoded(state) / (1 - beta ** float(self.state()["step"]))


RULE_ROWS = [name for name, spec in NATIVE.items() if spec.storage == "fp32"]
KEEN = ("adamw", "adamw_int8", "rmsprop_bf16", "lion", "sign")  # targets of every source


def targets_of(source: str) -> list[str]:
    """Every rule from every rule, every storage of a rule from every other, and some of all."""
    own = NATIVE[source]
    rows = RULE_ROWS if own.storage == "fp32" else KEEN
    return [n for n, spec in NATIVE.items() if n != source and (spec.rule == own.rule or n in rows or n in KEEN)]


@pytest.mark.slow
@pytest.mark.parametrize("source", NATIVE)
def test_update_rms_is_continuous_from_every_rule_and_storage(source: str) -> None:
    run = Run(source)
    held = {decl.kind for decl in RULES[NATIVE[source].rule].info.states}
    for target in targets_of(source):
        fork = run.fork()
        move = fork.move(target)
        rule = RULES[NATIVE[target].rule].info
        block = fork.optimizer.blocks[0]
        assert move.bytes_after == state_bytes(block, spec=NATIVE[target], rule=rule) == fork.optimizer.state_bytes()
        first = fork.step()
        tolerance = CONTINUITY_MATCHED if rule.matched else CONTINUITY_ADAMW
        assert abs(first / run.last_rms - 1) <= tolerance.rtol, f"to {target}: {run.last_rms:.3f} -> {first:.3f}"
        assert 0 < fork.step() < 2 * run.last_rms
        for decl in rule.states:  # nothing that is known is thrown away
            how, known = move.kept[decl.name], decl.kind in held
            assert how in (("kept", "converted") if known else ("new",)), f"to {target}: {move.kept}"
        states = [t for t in state_tensors(fork.optimizer).values() if t.is_floating_point()]
        assert all(t.isfinite().all() for t in [*states, *fork.params.values()])


class TestNoMomentsNoV:
    """v then starts from the next gradient, so that the update keeps its size; see `optim.seeding`."""

    @pytest.mark.parametrize("shapes", [SHAPES, {"linear": (300,), "conv": (7,)}], ids=["matrices", "vectors"])
    @pytest.mark.parametrize("source", ["sign", "lion", "signum_int8"])
    def test_the_update_rms_is_continuous(self, source: str, shapes: dict[str, tuple[int, ...]]) -> None:
        for target in ("adamw", "rmsprop", "adamw_int8"):
            run = Run(source, shapes=shapes)
            move = run.move(target, moments=False)
            assert move.kept["v"] == "new" and not run.decoded("v").any()
            assert source == "sign" or target == "rmsprop" or move.kept["m"] in ("kept", "converted")
            for _ in range(12):
                assert 0.35 * run.last_rms < run.step() < 1.6 * run.last_rms

    @pytest.mark.parametrize("at_once", [128, 2**20])
    @pytest.mark.parametrize("target", ["adamw", "adamw_int8", "adamw_int4", "rmsprop_int4", "foam_l2_int8"])
    def test_it_takes_the_room_that_is_predicted(
        self, target: str, at_once: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(codecs, "ELEMENTS_AT_ONCE", at_once)
        run = Run("lion", shapes={"linear": (512, 128)})
        run.move(target, moments=False)
        optimizer, params = run.optimizer, list(run.params.values())
        params[0].grad = torch.randn(512, 128)
        with PeakMeter(torch.device("cpu"), params, optimizer.state) as meter:
            held = meter.current_bytes
            seeding.seed(
                optimizer.registry.live.values(), registry=optimizer.registry, param_groups=[*optimizer.param_groups]
            )
        predicted = seeding.temporary_bytes(params)
        assert (0.7 if target == "adamw_int4" else 0.2) * predicted < meter.peak_bytes - held <= predicted

    def test_gradients_of_zero_start_nothing(self) -> None:
        run = Run("sign")
        run.move("adamw", moments=False)
        run.params["linear"].grad, run.params["conv"].grad = torch.zeros(17, 64), torch.full((8, 3, 3, 5), torch.nan)
        run.optimizer.step()
        assert not run.decoded("v").any()
        assert 0.35 * run.last_rms < run.step() < 1.6 * run.last_rms
        assert run.decoded("v").all()

    def test_rows_that_the_first_gradient_misses_do_not_explode(self) -> None:
        """An idle row of an embedding: m is inherited, and of v nothing is known but that it is no less than m^2."""
        run = Run("lion")
        run.move("adamw", moments=False)
        before = run.params["linear"].detach().clone()
        run.gradients.give(run.params)
        assert run.params["linear"].grad is not None
        run.params["linear"].grad[3] = 0
        run.optimizer.step()
        moved = (run.params["linear"].detach() - before).abs() / LR
        assert moved[3].any() and moved.max() < 2.5

    def test_what_waits_for_a_gradient_waits_across_moves_copies_and_checkpoints(self) -> None:
        run = Run("lion")
        run.move("adamw", moments=False)
        run.move("rmsprop_int8", moments=False)
        run.move("adamw_shared_in", moments=False)
        resumed = run.fork()
        resumed.optimizer.registry.live["all"].unseeded.clear()
        assert last_rms_of(run.optimizer, "all") == pytest.approx(run.last_rms, rel=0.1)
        resumed.optimizer.load_state_dict(run.optimizer.state_dict())
        for other in (run, resumed, run.fork()):
            assert 0.35 * run.last_rms < other.step() < 1.6 * run.last_rms


class TestInheritance:
    def test_full_v_becomes_its_mean_over_the_shared_axis(self) -> None:
        run = Run("adamw")
        v, m, step = run.decoded("v").clone(), run.state()["m"].clone(), run.state()["step"].clone()
        row = run.fork()
        assert row.move("adamw_shared_in").kept == {"m": "kept", "v": "converted"}
        torch.testing.assert_close(row.decoded("v"), v.mean(1))
        run.move("adamw_shared_out")
        torch.testing.assert_close(run.decoded("v"), v.mean(0))
        assert torch.equal(run.state()["m"], m) and torch.equal(run.state()["step"], step)

    def test_a_shared_v_is_broadcast(self) -> None:
        run = Run("adamw_shared_in")
        v = run.decoded("v").clone()
        run.move("adamw")
        assert torch.equal(run.decoded("v"), v.unsqueeze(1).expand(17, 64))
        run = Run("adamw_shared_out")
        v = run.decoded("v").clone()
        run.move("adamw")
        assert torch.equal(run.decoded("v"), v.unsqueeze(0).expand(17, 64))

    def test_v_is_factored_without_its_bias_and_multiplied_out_with_it(self) -> None:
        run = Run("adamw")
        v = run.debiased("v", BETAS[1])
        kept = run.move("adafactor").kept
        assert kept == {"m": "dropped", "v": "converted", "v_row": "converted", "v_col": "converted"}
        row, col = run.decoded("v_row").clone(), run.decoded("v_col").clone()
        torch.testing.assert_close(row, v.mean(1))
        torch.testing.assert_close(col, v.mean(0))
        run.move("adamw")
        torch.testing.assert_close(run.debiased("v", BETAS[1]), torch.outer(row, col) / row.mean())
        assert run.state()["step"] == STEPS

    def test_folding_means_m_and_allows_v_for_what_averaging_takes_away(self) -> None:
        run = Run("adamw", shapes={"linear": (6, 17)})
        lines = run.decoded("m").clone(), run.decoded("v").clone()
        run.move("foam_l2")
        folded = [torch.nn.functional.pad(x, (0, -x.shape[1] % 4)).unflatten(1, (-1, 4)).mean(2) for x in lines]
        torch.testing.assert_close(run.decoded("m"), folded[0])
        torch.testing.assert_close(run.decoded("v"), folded[1] / 4)
        run.move("adamw", moments=False)
        whole = lines[0].shape[1] // 4 * 4
        assert whole < lines[0].shape[1], "the last fold is padded with zeros"
        for back, mean, line in zip((run.decoded("m"), run.decoded("v")), folded, lines, strict=True):
            torch.testing.assert_close(back[:, :whole], mean.repeat_interleave(4, dim=1)[:, :whole])
            torch.testing.assert_close(back[:, whole:], line[:, whole:])

    def test_moments_give_a_folded_v_its_size(self) -> None:
        run = Run("foam_l3")
        run.move("adamw")
        mean = run.debiased("v", BETAS[1]).mean()
        torch.testing.assert_close(mean, run.moments["linear"].row.mean())

    def test_m_goes_to_sign_momentum_without_its_bias_and_back_with_it(self) -> None:
        run = Run("adamw", steps=3)  # so early that the bias is large
        m = run.debiased("m", BETAS[0])
        move = run.move("signum")
        assert move.kept == {"m": "converted", "v": "dropped"}
        torch.testing.assert_close(run.decoded("m"), m)
        assert set(run.state()) == {"m"}
        run.move("adamw")
        torch.testing.assert_close(run.debiased("m", BETAS[0]), m)

    def test_a_stateless_block_starts_v_from_its_moments(self) -> None:
        run = Run("sign")
        move = run.move("adamw")
        moments = run.moments["linear"]
        torch.testing.assert_close(
            run.debiased("v", BETAS[1]), torch.outer(moments.row, moments.col) / moments.row.mean()
        )
        assert move.kept == {"m": "new", "v": "new"} and run.state()["step"] == SEED_AGE
        assert not run.decoded("m").any()

    def test_a_seed_that_is_far_too_small_costs_one_learning_rate_at_most(self) -> None:
        run = Run("sign")
        run.moments = {n: Moments(row=m.row * 1e-12, col=m.col * 1e-12) for n, m in run.moments.items()}
        run.move("adamw")
        assert run.step() <= 1.01

    def test_any_to_stateless_drops_all(self) -> None:
        run = Run("adamw_int8")
        assert run.move("sign").kept == {"m": "dropped", "v": "dropped"}
        assert run.state() == {}

    def test_storage_is_encoded_and_the_error_told(self) -> None:
        run = Run("adamw")
        before = {state: {name: run.decoded(state, name).clone() for name in SHAPES} for state in "mv"}
        move = run.move("adamw_int8")
        assert move.kept == {"m": "converted", "v": "converted"} and move.why == "test"
        for name, held in before.items():
            error = [run.decoded(name, tensor) - wanted for tensor, wanted in held.items()]
            relative = (sum(e.square().sum() for e in error) / sum(x.square().sum() for x in held.values())) ** 0.5
            assert 1e-4 < relative < 0.02
            assert move.conversion_error[name] == pytest.approx(float(relative), rel=1e-5)  # over the block's tensors
        assert (move.source, move.target) == ("adamw", "adamw_int8")
        assert move.bytes_after < 0.3 * move.bytes_before

    def test_equal_storage_of_a_state_is_kept_untouched(self) -> None:
        run = Run("adamw_int8")
        payload = run.state()["m"].clone()
        move = run.move("adamw_shared_in_int8")
        assert move.kept["m"] == "kept" and "m" not in move.conversion_error
        assert torch.equal(run.state()["m"], payload)

    def test_states_of_zeros_are_encoded_without_error(self) -> None:
        run = Run("adamw", steps=0)
        for param in run.params.values():
            param.grad = torch.zeros_like(param)
        run.optimizer.step()
        assert run.move("adamw_int8").conversion_error == {"m": 0.0, "v": 0.0}

    @pytest.mark.parametrize(
        ("source", "target", "kept"),
        [
            ("adamw", "adamw_int8", {"m": "kept", "v": "kept"}),
            ("adamw", "rmsprop", {"m": "dropped", "v": "kept"}),
            ("adamw", "sign", {"m": "dropped", "v": "dropped"}),
            ("sign", "adamw", {"m": "new", "v": "new"}),
        ],
    )
    def test_before_the_first_step_nothing_is_converted(self, source: str, target: str, kept: dict[str, str]) -> None:
        run = Run(source, steps=0)
        move = run.move(target)
        assert move.kept == kept and not move.conversion_error
        assert all(not state.any() for state in run.state().values())

    def test_of_several_tensors_the_one_that_lost_most_speaks(self) -> None:
        """The first step left out one of two tensors, whose states therefore start anew."""
        run = Run("adamw", steps=0)
        run.params["linear"].grad = torch.ones(17, 64)
        run.optimizer.step()
        assert run.move("adamw_int8").kept == {"m": "converted", "v": "converted"}
        assert run.state("linear")["step"] == 1 and run.state("conv")["step"] == 0

    @pytest.mark.parametrize("target", NATIVE)
    def test_a_block_that_never_stepped_starts_as_if_it_had_been_built_so(self, target: str) -> None:
        moved, fresh = Run("adamw", steps=0), Run(target, steps=0)
        if target != "adamw":
            moved.move(target)
        for _ in range(3):
            moved.step()
            fresh.step()
        assert_same({n: p.detach() for n, p in moved.params.items()}, {n: p.detach() for n, p in fresh.params.items()})

    def test_a_transposed_weight_shares_along_its_own_fan_in(self) -> None:
        params = make_params({"w": (6, 10)})
        block = one_block("all", [info("w", (6, 10), transposed=True)])
        optimizer = build(params, {"all": "adamw"}, blocks=[block])
        run_steps(optimizer, params, gradients=Gradients(params), steps=3)
        v = optimizer.state[params["w"]]["v"].clone()
        optimizer.migrate({"all": "adamw_shared_in"})
        torch.testing.assert_close(optimizer.state[params["w"]]["v"], v.mean(0))
        assert optimizer.state[params["w"]]["v"].shape == (10,)


@pytest.mark.parametrize("steps", [1, 3])
def test_the_last_rms_is_of_the_elements_that_were_stepped(steps: int) -> None:
    """Not of a tensor that has had no gradient, nor of one without elements."""
    shapes = {"late": (5,), "matrix": (2, 3), "empty": (0,)}
    params = make_params(shapes)
    blocks = [one_block("all", [info(name, shape) for name, shape in shapes.items()])]
    optimizer = build(params, {"all": "adamw"}, blocks=blocks, lr=LR, weight_decay=0.0)
    moved = torch.zeros(())
    for _ in range(steps):
        for name in ("matrix", "empty"):
            params[name].grad = torch.randn(shapes[name])
        before = params["matrix"].detach().clone()
        optimizer.step()
        moved = (params["matrix"].detach() - before) / LR
    assert last_rms_of(optimizer, "all") == pytest.approx(float(moved.square().mean().sqrt()), rel=1e-4)


def test_a_last_rms_that_states_do_not_tell_is_unknown() -> None:
    _, optimizer, _ = trained(SHAPES, "lion", rms_matching=False, steps=1)
    assert last_rms_of(optimizer, "linear") is None


@pytest.mark.parametrize(("spec", "corrected"), [("adamw", True), ("lion", False)])
def test_no_v_is_seeded_below_the_square_of_m(spec: str, corrected: bool) -> None:
    run = Run(spec, steps=2)
    (slot,) = [slot for slot in run.optimizer.registry.live["all"].slots if slot.name == "conv"]
    given: dict[str, Any] = {"beta": 0.9, "age": 5, "ctx": slot.shape_context}
    m = run.decoded("m", "conv") / (1 - 0.9**5 if corrected else 1)
    torch.testing.assert_close(inherit.squared_m(slot, run.state("conv"), **given), m.square())
    (slot,) = [slot for slot in Run("rmsprop", steps=2).optimizer.registry.live["all"].slots if slot.name == "conv"]
    assert inherit.squared_m(slot, {}, **given) == 0


def test_a_tensor_without_elements_waits_for_no_gradient() -> None:
    params, optimizer, _ = trained({"empty": (0, 8), "one": (1,), "w": (4, 8)}, "lion", steps=1)
    optimizer.migrate(dict.fromkeys(params, "adamw"), why="test")
    assert [name for live in optimizer.registry.live.values() for name in live.unseeded] == ["one", "w"]
    run_steps(optimizer, params, gradients=Gradients(params), steps=1)
    assert not any(live.unseeded for live in optimizer.registry.live.values())


@pytest.mark.parametrize(
    ("source", "target", "needed"),
    [
        ("adamw", "adamw_shared_out", True),
        ("adafactor", "adamw", True),
        ("adamw_shared_out", "adamw", False),  # the same on all ranks
        ("adafactor", "adafactor_momentum", False),  # copied
        ("adamw", "adamw_shared_in", False),
        ("adamw", "rmsprop", False),
        ("lion", "adafactor", False),
        ("adafactor", "column_norm_momentum", False),
    ],
)
def test_rows_of_all_ranks_are_needed_where_v_becomes_a_sum_over_columns(
    source: str, target: str, needed: bool
) -> None:
    assert sums_over_all_rows(RULES[source].info, RULES[target].info) == needed


@pytest.mark.parametrize(
    ("source", "target", "seeded", "waits"),
    [
        ("adamw", "adafactor", True, False),
        ("adamw", "adamw_int8", False, True),
        ("adamw", "lion", False, False),
    ],
)
def test_v_waits_for_a_gradient_where_it_waited(source: str, target: str, seeded: bool, waits: bool) -> None:
    run = Run(source)
    (slot,) = [slot for slot in run.optimizer.registry.live["all"].slots if slot.name == "linear"]
    other = slot_with_spec(slot, spec=NATIVE[target])
    (new,), report = allocate([other]), ConversionReport()
    how: dict[str, Any] = {"betas": BETAS, "report": report, "before_first_step": False, "old_v_initialised": seeded}
    assert convert(slot, run.state(), other, new, spec=NATIVE[target], **how) == waits
    for kept in other.states:
        new_one = waits and kept.decl.kind is StateKind.V
        assert kept.decode(new).any() != new_one and (report.outcomes[kept.decl.name] == "new") == new_one
    if other.counts_steps:
        assert new["step"] == (SEED_AGE if waits else STEPS)


def test_ranks_convert_together_and_each_takes_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 rows this rank has three, which are enough for some rules; `unsharded_state` brings what all have."""
    rows = slice(2, 5)
    shard: Any = SimpleNamespace(param=torch.zeros(8, 6), group=SimpleNamespace(size=2), offset=12)
    shard.local_part = lambda value, shape: value[rows].reshape(shape)
    given: dict[str, Any] = {"info": replace(info("w", (3, 6)), whole=(8, 6)), "group": 0, "shard": shard}
    specs = (NATIVE["adamw"], NATIVE["adafactor_momentum"])
    source, target = (make_slot("w", torch.zeros(3, 6), spec=spec, **given) for spec in specs)
    whole = {"step": torch.tensor(7.0), "m": torch.rand(8, 6), "v": torch.rand(8, 6)}
    asked: list[Any] = []
    monkeypatch.setattr(migrate, "unsharded_state", lambda *args, spec: asked.append((*args, spec)) or whole)
    (old,), (new,), report = allocate([source]), allocate([target]), ConversionReport()
    how: dict[str, Any] = {"betas": BETAS, "report": report, "before_first_step": False, "old_v_initialised": True}
    for into, together in ((source, False), (target, True)):
        with torch.device("meta"):  # a default device of the user's
            found, state = migrate.gather_if_needed(source, old, spec=specs[0], into=into.rule.info)
        assert (found.info.shape, found.param.device.type) == ((8, 6) if together else (3, 6), "cpu")
        assert state is (whole if together else old)
    assert not convert(found, state, target, new, spec=specs[1], **how)
    assert asked == [(source, old, specs[0])] and report.outcomes["v_row"] == "converted"
    own = make_slot("w", torch.zeros(3, 6), spec=NATIVE["rmsprop"], **given)
    (own_new,), old["v"], old["step"] = allocate([own]), torch.rand(3, 6), torch.tensor(3.0)
    assert not convert(source, old, own, own_new, spec=NATIVE["rmsprop"], **how)
    assert own_new["step"] == 3 and torch.equal(own_new["v"], old["v"])
    v = whole["v"] / (1 - BETAS[1] ** 7)
    assert new["step"] == 7 and torch.equal(new["m"], whole["m"][rows])
    torch.testing.assert_close(new["v_row"], v.mean(1)[rows])
    torch.testing.assert_close(new["v_col"], v.mean(0))


def test_a_group_of_one_rank_moves_states_as_no_group_does(tmp_path: Path) -> None:
    found: list[dict[str, Tensor]] = []
    with group(0, 1, store=tmp_path / "store"):
        mesh = init_device_mesh("cpu", (1,))
        for sharded in (False, True):
            torch.manual_seed(0)
            net = nn.Linear(64, 48, bias=False)
            if sharded:
                fully_shard(net, mesh=mesh)
            optimizer = BlockwiseOptimizer(net, "adamw_int8")
            for _ in range(3):
                grad: Any = torch.randn(48, 64)
                net.weight.grad = distribute_tensor(grad, mesh, [Shard(0)]) if sharded else grad
                optimizer.step()
            assert (next(iter(optimizer.registry.live.values())).slots[0].shard is not None) == sharded
            with torch.device("meta"):  # a default device of the user's
                optimizer.migrate(dict.fromkeys(optimizer.registry.live, "adafactor_momentum_int8"))
            found.append(dict(optimizer.state[net.weight]))
    assert found[0].keys() == {"step", "m", "m.scale", "v_row", "v_col"} and found[0]["v_row"].all()
    assert_same(*found)


def test_states_that_count_steps_without_v_keep_their_age() -> None:
    """As rules of one's own may."""
    run = Run("lion")
    (slot,) = [slot for slot in run.optimizer.registry.live["all"].slots if slot.name == "linear"]
    counting = replace(slot, counts_steps=True)
    (new,), old = allocate([counting]), {**run.state(), "step": torch.tensor(7.0)}
    how: dict[str, Any] = {
        "betas": BETAS,
        "report": ConversionReport(),
        "before_first_step": False,
        "spec": NATIVE["lion"],
    }
    assert not convert(counting, old, counting, new, old_v_initialised=True, **how)
    assert new["step"] == 7 and torch.equal(new["m"], run.state()["m"])


def test_v_that_moments_see_too_small_is_the_square_of_m_without_its_bias() -> None:
    run = Run("adafactor_momentum")
    run.optimizer.registry.live["all"].unseeded = set(SHAPES)
    run.moments = {n: Moments(row=m.row * 1e-30, col=m.col * 1e-30) for n, m in run.moments.items()}
    run.move("adamw")
    m = run.decoded("m") / (1 - BETAS[0] ** SEED_AGE)
    wanted = m.square() * (1 - BETAS[1] ** SEED_AGE)
    torch.testing.assert_close(run.decoded("v"), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("size", "expected"), [(1, (3.0, 1)), (2, (5.0, 2**24 + 1))])
def test_the_norm_of_a_tensor_is_that_of_all_ranks_rows(size: int, expected: tuple[float, int]) -> None:
    others = torch.tensor([16.0, 2**24], dtype=torch.float64)
    group = SimpleNamespace(size=size, all_reduce_=lambda sums: sums.add_(others))
    slot: Any = SimpleNamespace(shard=SimpleNamespace(group=group), param=torch.zeros(1))
    with torch.device("meta"):  # a default device of the user's
        assert norm_over_ranks(slot, norm=3.0, count=1) == expected


def test_conversion_errors_are_summed_up_in_double_precision() -> None:
    report = ConversionReport()
    for _ in range(2):
        report.measure("m", wanted=torch.tensor([4096.0, 1.0]), stored=torch.tensor([0.0, 0.0]))
    assert report.size == report.error == {"m": 2.0 * (2**24 + 1)}


@pytest.mark.parametrize("target", ["adamw", "sign", "lion_int8+split8", "adamw+split8@streamed", "adamw@streamed"])
@pytest.mark.parametrize("held", ["adamw", "adamw+split8@streamed"])
def test_the_growth_of_a_move_is_of_states_and_weights_on_the_device(target: str, held: str) -> None:
    def live(spec: str) -> tuple[LiveBlock, int]:
        optimizer = build(make_params({"w": (64, 64)}), spec)
        on_device = 0 if spec.endswith("@streamed") else optimizer.state_bytes()
        return optimizer.registry.live["w"], on_device + 4096 * (2 if "split8" in spec else 4)

    (after, more), (before, less) = live(target), live(held)
    assert device_growth(after, source=before) == more - less


def test_states_are_computed_on_the_parameters_device_whatever_the_defaults() -> None:
    params = make_params({"linear": (6, 17)})
    (live,) = build(params, "rmsprop").registry.live.values()
    (slot,) = live.slots
    folded = StateDecl(name="v", kind=StateKind.V, layout=StateLayout.FOLDED, level=2)
    value, row, col = torch.rand(6, 5), torch.rand(6, dtype=torch.float64), torch.rand(17, dtype=torch.float64)

    def computed() -> list[Tensor]:
        moments = inherit.from_moments(Moments(row=row, col=col), ctx=slot.shape_context, param=slot.param)
        nothing = inherit.squared_m(slot, {}, beta=0.9, age=3, ctx=slot.shape_context)
        return [inherit.expand({folded: value}, ctx=slot.shape_context, shape=(6, 17)), moments, nothing]

    wanted = computed()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = computed()
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(wanted, found, strict=True):
        assert a.device == b.device and a.dtype == b.dtype == torch.float32 and torch.equal(a, b)
    away = inherit.from_moments(Moments(row=row, col=col), ctx=slot.shape_context, param=slot.param.to("meta"))
    assert away.device.type == "meta"
