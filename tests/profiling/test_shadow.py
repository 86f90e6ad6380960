"""Shadow runs against the rules themselves, and terms against values that are known."""

from math import sqrt

import pytest
import torch
from torch import Tensor

from baoc.core.catalogue import NATIVE, STORAGES
from baoc.optim.codecs import CODEC_IMPLS
from baoc.optim.rules import RULES, RuleContext
from baoc.profiling.shadow import BURN_IN, TERMS, Shadow, ShadowRun, bytes_per_element, elementwise, shadowed
from baoc.profiling.slices import Slices
from baoc.types import OptimizerSpec, ParamInfo, Role, StateKind
from tests.support.gradients import make_block, normal, signs

CPU = torch.device("cpu")
BETAS, EPS = (0.9, 0.999), 1e-8
BLOCKS = [make_block("a", (512, 32), (16, 512)), make_block("t", (512, 512), transposed=True), make_block("v", (50,))]


def gathered(slices: Slices, step: int, scale: float = 1.0) -> Tensor:
    flat = slices.new(CPU)
    grads = {
        p.name: scale * normal(*p.shape, seed=100 * step + i)
        for i, p in enumerate(param for block in slices.blocks for param in block.params)
    }
    slices.gather_(slices.targets(flat), grads=grads)
    return flat


def alone(spec: OptimizerSpec, param: ParamInfo, grads: list[Tensor]) -> Tensor:
    """The last update of a tensor that is stepped by itself, with its own coded states."""
    rule, storage = RULES[spec.rule], STORAGES[spec.storage]
    codecs = {decl.name: CODEC_IMPLS[storage.codec(decl)] for decl in rule.info.states}
    parts = {decl.name: codecs[decl.name].allocate(decl.shape(param), CPU) for decl in rule.info.states}
    update = torch.zeros(param.shape)
    for count, grad in enumerate(grads, start=1):
        ctx = RuleContext(
            step=count if rule.info.counts_steps else 0,
            beta1=BETAS[0],
            beta2=BETAS[1],
            eps=EPS,
            matrix=param.matrix_shape,
            transposed=param.transposed,
        )
        states = {d.name: codecs[d.name].decode(parts[d.name], d.shape(param)) for d in rule.info.states}
        direction = rule.direction(grad, states=states, ctx=ctx)
        update = direction.update() / direction.divisor
        for decl in rule.info.states:
            phase = count if decl.kind is StateKind.V or codecs[decl.name].info.phased else None
            codecs[decl.name].encode_(parts[decl.name], states[decl.name], phase=phase)
    return update


@pytest.mark.parametrize("spec", NATIVE.values(), ids=lambda spec: spec.name)
def test_every_spec_steps_in_the_shared_buffer_as_it_does_alone(spec: OptimizerSpec):
    """One coded tensor for all pieces, and one call for elementwise rules, change nothing."""
    slices = Slices(BLOCKS, max_elements=10**6, device=CPU)
    run = ShadowRun(spec, slices=slices, device=CPU)
    flats = [gathered(slices, step) for step in range(3)]
    for count, flat in enumerate(flats, start=1):
        run.step(flat, count=count, betas=BETAS, eps=EPS)
    stepped = 0
    for piece in slices.pieces:
        part = slice(piece.offset, piece.offset + piece.numel)
        if not run.covers[piece.block]:
            continue
        expected = alone(spec, piece.sampled, [flat[part].view(piece.shape) for flat in flats])
        torch.testing.assert_close(run.update[part].view(piece.shape), expected, rtol=2e-6, atol=1e-7)
        stepped += 1
    assert stepped == sum(run.covers[piece.block] for piece in slices.pieces) > 0
    assert sum(unit.param.numel for unit in run.units) >= 512 * 512


def terms_of(specs: list[OptimizerSpec], flats: list[Tensor], slices: Slices) -> dict[str, dict[str, dict[str, float]]]:
    shadow = Shadow(slices, specs=specs, betas=BETAS, eps=EPS, device=CPU)
    for flat in flats:
        shadow.observe_next(flat)
        shadow.observe(flat)
    return shadow.terms()


def test_adamw_beside_itself_is_at_distance_zero():
    slices = Slices(BLOCKS, max_elements=10**6, device=CPU)
    found = terms_of([NATIVE["adamw"]], [gathered(slices, s) for s in range(8)], slices)
    for block in BLOCKS:
        assert found[block.name]["adamw"] == dict.fromkeys(TERMS, 0.0)


def test_terms_of_sign_against_adamw_worked_out_by_hand():
    blocks = [make_block("w", (16, 24))]
    slices = Slices(blocks, max_elements=10**6, device=CPU)
    flats = [gathered(slices, s) for s in range(6)]
    found = terms_of([NATIVE["sign"]], flats, slices)["w"]["sign"]
    m = v = torch.zeros(16 * 24, dtype=torch.float64)
    sums = dict.fromkeys(("cosine", "rel_error", "vmetric"), 0.0)
    gained = descent = squares = 0.0
    previous: tuple[Tensor, Tensor] | None = None
    for t, flat in enumerate(flats, start=1):
        g = flat.double()
        if previous is not None:
            gained += float(g @ previous[0])
            descent += float(g @ previous[1])
            squares += float(g @ previous[1]) ** 2
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g.square()
        ref = m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + EPS)
        sign = g.sign() * ref.norm() / g.sign().norm()
        if t > BURN_IN:
            previous = (sign, ref)
            metric = v.sqrt()
            sums["cosine"] += 1 - float(sign @ ref / (sign.norm() * ref.norm()))
            sums["rel_error"] += float((sign - ref).norm() / ref.norm())
            sums["vmetric"] += sqrt(float((metric * (sign - ref).square()).sum() / (metric * ref.square()).sum()))
    for name, total in sums.items():
        assert found[name] == pytest.approx(total / (6 - BURN_IN), rel=1e-4), name
    assert found["descent_next"] == pytest.approx((descent - gained) / max(descent, sqrt(squares)), rel=1e-4)


def test_equal_rms_so_the_scale_of_an_update_plays_no_part():
    """relative error follows from the cosine alone: ||u - r||^2 = 2 ||r||^2 (1 - cos)."""
    slices = Slices(BLOCKS, max_elements=10**6, device=CPU)
    found = terms_of([NATIVE["signum"], NATIVE["foam_l1"]], [gathered(slices, 7)] * 3, slices)
    for spec in ("signum", "foam_l1"):
        terms = found["a"][spec]
        assert terms["rel_error"] == pytest.approx(sqrt(2 * terms["cosine"]), rel=1e-4)


def test_a_rule_that_gives_up_what_is_not_there_is_at_distance_zero():
    """v depends on the row only: sharing it along fan-in loses nothing, along fan-out it does."""
    blocks = [make_block("w", (64, 48))]
    slices = Slices(blocks, max_elements=10**6, device=CPU)
    rows = normal(64, 1, seed=0).exp()
    flats = []
    for step in range(6):
        flat = slices.new(CPU)
        slices.gather_(slices.targets(flat), grads={"w.0": rows * signs(64, 48, seed=step)})
        flats.append(flat)
    found = terms_of([NATIVE["adamw_shared_in"], NATIVE["adamw_shared_out"]], flats, slices)["w"]
    assert found["adamw_shared_in"]["rel_error"] < 1e-3
    assert found["adamw_shared_out"]["rel_error"] > 0.3


def test_coarser_storage_is_never_nearer():
    slices = Slices(BLOCKS, max_elements=10**6, device=CPU)
    specs = [NATIVE[name] for name in ("adamw_bf16", "adamw_int8")]
    found = terms_of(specs, [gathered(slices, s) for s in range(10)], slices)
    for block in BLOCKS:
        near, far = (found[block.name][spec.name]["rel_error"] for spec in specs)
        assert 0 < near < far < 0.1


def test_descent_is_judged_on_the_next_gradient_and_once_per_sample():
    """A faint direction under noise: the sign of one gradient goes downhill on the next less than an average does."""
    slices = Slices([make_block("w", (4096,))], max_elements=10**6, device=CPU)
    found = []
    for extra in (False, True):
        shadow = Shadow(slices, specs=[NATIVE["sign"]], betas=BETAS, eps=EPS, device=CPU)
        for step in range(30):
            flat = 0.3 * gathered(slices, 99) + gathered(slices, step)
            shadow.observe_next(flat)
            if extra:  # a second gradient before the next sample is not another answer
                shadow.observe_next(flat * 100)
            shadow.observe(flat)
        found.append(shadow.terms()["w"]["sign"])
    assert 0.3 < found[0]["descent_next"] < 0.9
    assert found[0] == found[1]


def test_a_block_without_gradient_loses_nothing():
    blocks = [make_block("w", (16, 16))]
    slices = Slices(blocks, max_elements=10**6, device=CPU)
    found = terms_of([NATIVE["sign"], NATIVE["adafactor"]], [slices.new(CPU)] * 5, slices)
    assert all(value == 0.0 for terms in found["w"].values() for value in terms.values())


def test_nothing_is_said_during_burn_in():
    slices = Slices(BLOCKS, max_elements=10**6, device=CPU)
    assert terms_of([NATIVE["sign"]], [gathered(slices, s) for s in range(BURN_IN)], slices) == {}


def test_specs_that_apply_nowhere_and_adamw_itself_are_not_run():
    vectors = [make_block("v", (50,))]
    names = [spec.name for spec in shadowed(list(NATIVE.values()), blocks=vectors)]
    assert "adamw" not in names and "foam_l1" not in names
    assert {"adamw_bf16", "rmsprop", "lion_int8", "sign"} <= set(names)


def test_bytes_per_element_bound_what_is_held():
    specs = list(NATIVE.values())
    slices = Slices([make_block("w", (256, 256))], max_elements=10**6, device=CPU)
    shadow = Shadow(slices, specs=specs, betas=BETAS, eps=EPS, device=CPU)
    assert 0.5 * bytes_per_element(specs) * slices.numel < shadow.nbytes <= bytes_per_element(specs) * slices.numel


def test_rules_taken_for_elementwise_are():
    """Half of a vector steps as it does within the whole; a rule that reduces must say so by its tags."""
    for spec in NATIVE.values():
        if spec.storage != "fp32" or not elementwise(RULES[spec.rule].info):
            continue
        whole = ParamInfo(name="w", shape=(64,), dtype="float32", role=Role.OTHER)
        half = ParamInfo(name="h", shape=(32,), dtype="float32", role=Role.OTHER)
        grads = [normal(64, seed=s) * torch.arange(1, 65) for s in range(3)]
        expected = alone(spec, half, [grad[:32] for grad in grads])
        torch.testing.assert_close(alone(spec, whole, grads)[:32], expected, rtol=1e-6, atol=1e-9)
