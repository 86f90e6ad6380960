"""The 4-bit codecs beyond what every codec promises: layout and arithmetic by hand, and what their phase is for."""

import math

import pytest
import torch
from torch import Tensor, nn

from baoc.core.catalogue import LEAST_PACKED
from baoc.optim.codecs import CODEC_IMPLS, lanes
from tests.support.optimizing import build

ROOT, LATTICE = CODEC_IMPLS["root4"], CODEC_IMPLS["lattice4"]
PHASE = 7


def normal(num: int, *, seed: int = 0) -> Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed))


def encode(codec, values: Tensor, *, phase: int | None = PHASE) -> dict[str, Tensor]:
    parts = codec.allocate(values.shape, "cpu")
    codec.encode_(parts, values, phase=phase)
    return parts


def nibbles(payload: Tensor, numel: int) -> list[int]:
    """Codes in the order of elements: low nibble first."""
    codes = [code for byte in payload.tolist() for code in (byte & 15, byte >> 4)]
    assert not any(codes[numel:]), "what is left over is 0"
    return codes[:numel]


def test_root4_is_its_formula() -> None:
    m = normal(201)
    parts = encode(ROOT, m)
    thresholds = lanes(PHASE, torch.device("cpu")).tolist()
    codes, decoded = nibbles(parts[""], 201), ROOT.decode(parts, (201,)).tolist()
    assert parts[""].shape == (101,) and parts[".scale"].shape == (4,)
    for i, value in enumerate(m.tolist()):
        scale = float(parts[".scale"][i // 64])
        y = 49 * abs(value) / scale
        low = min(math.floor(math.sqrt(y)), 6)
        size = low + (y - low**2 >= thresholds[i % 32] * (2 * low + 1)) if y >= 0.5 else 0
        code = codes[i] - 16 if codes[i] > 7 else codes[i]
        assert code == (size if value > 0 else -size)
        assert decoded[i] == pytest.approx(scale * code * abs(code) / 49, rel=1e-6)


@pytest.mark.parametrize(("octaves", "k"), [(1.5, 3), (3.0, 2), (6.0, 1), (12.0, 0), (20.0, 0)])
def test_lattice4_is_its_formula_at_every_spread(octaves: float, k: int) -> None:
    roots = torch.exp2(-octaves * torch.linspace(0, 1, 64)[torch.randperm(64)]) * 1e-3
    parts = encode(LATTICE, roots.square())
    thresholds = lanes(PHASE, torch.device("cpu")).tolist()
    word, unit = int(parts[".scale"]), 8 >> k
    assert word & 3 == k
    top = word >> 2
    assert top % unit == 0 and 0 <= top - 8 * math.log2(float(roots.max())) < unit
    ratio = 2 ** (unit / 4)
    decoded = LATTICE.decode(parts, (64,)).tolist()
    for i, (root, code) in enumerate(zip(roots.tolist(), nibbles(parts[""], 64), strict=True)):
        warped = math.log1p(thresholds[i % 32] * (ratio - 1)) / math.log(ratio)
        place = 15 + (8 * math.log2(root) - top) / unit + 1 - warped
        assert code == min(max(math.floor(place), 1), 15) or abs(place - round(place)) < 1e-4
        assert decoded[i] == pytest.approx(2 ** ((top - (15 - code) * unit) / 4), rel=1e-6)


def test_a_lattice_is_made_finer_only_with_room_to_spare() -> None:
    """Units between the largest and the least root: 17 fit a lattice that is there, not one that would be new."""
    roots = torch.full((64,), 1.0)
    roots[0] = 2.0 ** (-17 / 8)
    coarse = roots.clone()
    coarse[0] = 2.0**-3
    parts = encode(LATTICE, roots.square(), phase=None)
    assert int(parts[".scale"]) & 3 == 3
    LATTICE.encode_(parts, roots.square(), phase=PHASE)
    assert int(parts[".scale"]) & 3 == 3, "it stays"
    LATTICE.encode_(parts, coarse.square(), phase=PHASE)
    assert int(parts[".scale"]) & 3 == 2
    LATTICE.encode_(parts, roots.square(), phase=PHASE)
    assert int(parts[".scale"]) & 3 == 2, "it does not go back yet"


@pytest.mark.parametrize("octaves", [1.5, 3.0, 6.0, 12.0])
def test_what_stood_still_keeps_its_lattice_though_logarithms_end_a_bit_apart(octaves: float) -> None:
    """A root on its lattice has a whole exponent: on a GPU, whose log2 is off by 2^-22, it may be a bit above."""
    roots = torch.exp2(-octaves * torch.linspace(0, 1, 64)) * 1e-3
    parts = encode(LATTICE, roots.square())
    values = LATTICE.decode(parts, (64,))
    LATTICE.encode_(parts, values, phase=PHASE)  # the largest may have been rounded down, and the lattice's top with it
    word = int(parts[".scale"])
    for nudge in (1 - 2e-6, 1.0, 1 + 2e-6):
        for phase in (PHASE + 1, None):
            LATTICE.encode_(parts, values * nudge, phase=phase)
            assert int(parts[".scale"]) == word
        assert torch.equal(LATTICE.decode(parts, (64,)), values)


def test_groups_of_one_tensor_have_lattices_of_their_own_and_none_without_a_positive_element() -> None:
    groups = [torch.zeros(64), torch.full((64,), 2.0**-20), torch.full((64,), 2.0**10)]
    for phase in (None, PHASE):
        parts = encode(LATTICE, torch.cat(groups).square(), phase=phase)
        assert parts[".scale"].tolist() == [0, 4 * -160 + 3, 4 * 80 + 3]
        assert torch.equal(LATTICE.decode(parts, (192,)), torch.cat(groups).square())


@pytest.mark.parametrize(
    ("units", "kept", "k"), [(18, None, 3), (19, None, 2), (16, 2, 3), (17, 2, 2), (18, 3, 3), (19, 3, 2)]
)
def test_the_finest_lattice_that_has_room_is_taken(units: int, kept: int | None, k: int) -> None:
    roots = torch.ones(64)
    roots[0] = 2.0 ** (-units / 8)
    parts = LATTICE.allocate((64,), "cpu")
    parts[".scale"].fill_(kept or 0)
    LATTICE.encode_(parts, roots.square(), phase=None if kept is None else PHASE)
    assert int(parts[".scale"]) == k


def test_a_root_a_hair_above_its_lattice_is_never_wrapped_around() -> None:
    values = torch.full((64,), (1 + 1e-4) ** 2)
    parts = LATTICE.allocate((64,), "cpu")
    for phase in range(400):
        LATTICE.encode_(parts, values, phase=phase)
        assert (LATTICE.decode(parts, (64,)) >= 0.8).all()


def test_codes_of_root4_that_lie_on_a_bound_go_up() -> None:
    """The largest stays what it is with a threshold of 1, and the least that counts is doubled."""
    values = torch.zeros(64)
    values[:2] = torch.tensor([98.0, 1.0])
    assert lanes(0, torch.device("cpu"))[0] == 1
    assert ROOT.decode(encode(ROOT, values, phase=0), (64,))[0] == 98
    assert ROOT.decode(encode(ROOT, values, phase=None), (64,))[:3].tolist() == [98, 2, 0]


def test_a_group_whose_largest_grows_keeps_the_others_bit_for_bit() -> None:
    values = torch.exp(normal(64)).square()
    parts = encode(LATTICE, values)
    before = LATTICE.decode(parts, (64,))
    grown = before.clone()
    grown[int(before.argmax())] *= 4
    LATTICE.encode_(parts, grown, phase=PHASE + 1)
    after = LATTICE.decode(parts, (64,))
    assert int((after != before).sum()) == 1


def decayed(*, phased: bool) -> Tensor:
    """m of elements whose gradients stopped, in a group where others' go on."""
    m = normal(64)
    parts = ROOT.allocate((64,), "cpu")
    ROOT.encode_(parts, m, phase=0 if phased else None)
    for step in range(1, 200):
        m = 0.9 * ROOT.decode(parts, (64,))
        m[0] = 3.0
        ROOT.encode_(parts, m, phase=step if phased else None)
    return ROOT.decode(parts, (64,))[1:]


def test_momentum_fades_away_where_gradients_stop_which_it_would_not_to_nearest() -> None:
    assert not decayed(phased=True).any()
    assert int((decayed(phased=False) != 0).sum()) > 30


def test_momentum_in_the_optimizer_is_rounded_by_the_phase() -> None:
    params = {"w": nn.Parameter(torch.zeros(64, 64))}
    optimizer = build(params, "lion_int4", lr=0.0)
    grad = normal(4096).view(64, 64)
    seen = []
    for _ in range(2):
        params["w"].grad = grad.clone()
        optimizer.step()
        seen.append(optimizer.state[params["w"]]["m"].clone())
    # m is 1.99 times what it was, and so is its scale: to nearest, codes would be the same.
    assert int((seen[0] != seen[1]).sum()) > 200


@pytest.mark.parametrize("numel", [LEAST_PACKED - 1, LEAST_PACKED])
def test_only_states_of_many_numbers_are_packed(numel: int) -> None:
    params = {"w": nn.Parameter(torch.zeros(numel))}
    state = build(params, "adamw_int4").state[params["w"]]
    packed = {"m": torch.uint8, "m.scale": torch.bfloat16, "v": torch.uint8, "v.scale": torch.int16}
    plain = {"m": torch.float32, "v": torch.float32}
    assert {key: t.dtype for key, t in state.items() if key != "step"} == (packed if numel >= LEAST_PACKED else plain)
