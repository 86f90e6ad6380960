"""How far codecs are from the number they keep: once, and over thousands of steps of a running average."""

import pytest
import torch
from torch import Tensor

from baoc.core.catalogue import CODECS
from baoc.optim.codecs import CODEC_IMPLS
from tests.support.tolerances import CODEC_NEAREST

NUM = 32 * 2048
STEPS = 2000


def roundtrip(name: str, values: Tensor) -> Tensor:
    codec = CODEC_IMPLS[name]
    parts = codec.allocate(values.shape, "cpu")
    codec.encode_(parts, values)
    return codec.decode(parts, values.shape)


def normal(num: int = NUM, *, seed: int = 0) -> Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", CODEC_NEAREST)
def test_one_encoding_is_within_half_a_code(name: str) -> None:
    tolerance, values = CODEC_NEAREST[name], normal()
    if name in ("sqrt8", "root8v"):
        values = values.square()
    decoded, group = roundtrip(name, values), CODECS[name].group or 32
    scale = values.abs().view(-1, group).amax(1, keepdim=True) * (1 + 2**-7)  # rounded up to bf16
    largest = scale.expand(-1, group).reshape(-1)
    allowed = tolerance.rtol * values.abs() + tolerance.atol * largest
    assert ((decoded - values).abs() <= allowed).all()
    nmse = float((decoded - values).square().mean() / values.square().mean())
    assert nmse <= tolerance.nmse
    assert name == "fp32" or nmse > tolerance.nmse / 4  # the bound means something


def test_codes_of_the_companding_codecs_are_the_formulas_of_methods_3() -> None:
    m = normal(320)
    scale = m.view(-1, 32).abs().amax(1)
    codec = CODEC_IMPLS["softsign8"]
    parts = codec.allocate((320,), "cpu")
    codec.encode_(parts, m)
    kept = parts[".scale"].double()
    assert ((kept >= scale) & (kept <= scale * (1 + 2**-7))).all()
    x = m.double().view(-1, 32) / kept.unsqueeze(1)
    assert torch.equal((127 * 2 * x / (1 + x.abs())).round().to(torch.int8).view(-1), parts[""])
    y = parts[""].double().view(-1, 32) / 127
    back = (y / (2 - y.abs()) * kept.unsqueeze(1)).view(-1)
    assert torch.allclose(codec.decode(parts, (320,)).double(), back, rtol=1e-6, atol=0)

    codec = CODEC_IMPLS["sqrt8"]
    parts = codec.allocate((320,), "cpu")
    codec.encode_(parts, m.square())
    code = (255 * m.abs().double().view(-1, 32) / parts[".scale"].double().unsqueeze(1)).round().clamp(min=1)
    assert torch.equal(code.to(torch.uint8).view(-1), parts[""])


@pytest.mark.parametrize(
    ("codecs", "spread", "expected"),
    [
        # share of coordinates whose m / sqrt(v) is off by more than .1: the table in docs/methods.md#codecs
        (("softsign8", "sqrt8"), 0.5, 0.0001),
        (("softsign8", "sqrt8"), 1.0, 0.037),
        (("softsign8", "sqrt8"), 1.5, 0.206),
        (("softsign8", "sqrt8"), 2.0, 0.39),
        (("root8m", "root8v"), 0.5, 0.0),
        (("root8m", "root8v"), 1.0, 0.0006),
        (("root8m", "root8v"), 1.5, 0.006),
        (("root8m", "root8v"), 2.0, 0.024),
    ],
)
def test_update_errors_by_spread_are_those_of_methods_3(
    codecs: tuple[str, str], spread: float, expected: float
) -> None:
    s = torch.exp(spread * normal())
    ratio = normal(seed=1)
    stored = roundtrip(codecs[0], ratio * s) / roundtrip(codecs[1], s.square()).sqrt()
    share = float(((stored - ratio).abs() > 0.1).float().mean())
    assert share <= expected * 1.15 + 2e-4
    assert share >= expected * 0.55 - 2e-4


def average(name: str, *, scale: Tensor, noise: bool, dithered: bool) -> Tensor:
    """A running average of squares over STEPS steps, as a ratio to the true mean square."""
    codec, beta, shape = CODEC_IMPLS[name], 0.999, scale.shape
    generator = torch.Generator().manual_seed(1)
    parts = codec.allocate(shape, "cpu")
    for step in range(1, STEPS + 1):
        grad = scale * torch.randn(shape, generator=generator) if noise else scale
        v = codec.decode(parts, shape).mul(beta).add(grad.square(), alpha=1 - beta)
        codec.encode_(parts, v, phase=step if dithered else None)
    return codec.decode(parts, shape) / (1 - beta**STEPS) / scale.square()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "deviation"), [("bf16", 0.06), ("sqrt8", 0.15), ("root8v", 0.15), ("lattice4", 0.6)])
@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_a_running_average_keeps_its_mean_over_thousands_of_steps(name: str, deviation: float, spread: float) -> None:
    ratio = average(name, scale=torch.exp(spread * normal(32 * 64)), noise=True, dithered=True)
    assert abs(float(ratio.mean()) - 1) < (0.03 if name != "lattice4" else 0.06)  # it lifts a group's least
    assert float(ratio.log().std()) < deviation  # .032 at fp32


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "sqrt8", "root8v"])
def test_a_constant_square_is_reached(name: str) -> None:
    ratio = average(name, scale=torch.full((256,), 0.5), noise=False, dithered=True)
    assert ((ratio > 0.7) & (ratio < 1.3)).all()
    assert abs(float(ratio.mean()) - 1) < 0.06  # eight equal groups are in step, so this mean is one of 32 numbers


@pytest.mark.parametrize("name", ["bf16", "sqrt8"])
def test_to_nearest_an_average_would_stand_still_or_drift(name: str) -> None:
    """What the phase is for: without it these end at a fraction or a multiple of the mean."""
    ratio = float(average(name, scale=torch.full((256,), 0.5), noise=False, dithered=False).mean())
    assert ratio < 0.5 or ratio > 2
