"""What every codec promises, whichever is registered: bytes, zeros, positive v, nothing non-finite, any scale."""

import pytest
import torch

from baoc.core.catalogue import CODECS, STORAGES
from baoc.optim import codecs
from baoc.optim.codecs import CODEC_IMPLS, Codec, StoredState, lanes
from baoc.types import StateDecl, StateKind, StateLayout

SIZES = [(0,), (1,), (7,), (32,), (33,), (255,), (256,), (257,), (9991,), (17, 64), (8, 3, 3, 5)]
FOR_V = {storage.v for storage in STORAGES.values()}
FOR_M = {storage.m for storage in STORAGES.values()}
# Thresholds of stochastic rounding differ from phase to phase: each promise is held in all of these. They are looped
# over inside the tests, because 41 cases of a millisecond each cost more to collect and report than to run.
PHASES = (None, *range(40))
# Phases in which some threshold is within 1e-7 of 0 or of 1: there the rounding noise of decoding would move a code.
SHARP = (1_218_296, 1_058_039, 1_378_553, 160_257)
LEAST_COSINE = {32: 1 - 1e-6, 16: 0.9999, 8: 0.995, 4: 0.8}  # by bits; v here is one square: the widest there is


def make(name: str, values: torch.Tensor, *, phase: int | None = None) -> torch.Tensor:
    codec = CODEC_IMPLS[name]
    parts = codec.allocate(values.shape, "cpu")
    codec.encode_(parts, values, phase=phase)
    return codec.decode(parts, values.shape)


def sample(name: str, shape: tuple[int, ...], *, seed: int = 0) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.square() if name in FOR_V and name not in FOR_M else values


def test_every_row_of_the_catalogue_is_implemented() -> None:
    assert CODEC_IMPLS.keys() == CODECS.keys()
    for name, codec in CODEC_IMPLS.items():
        assert codec.info is CODECS[name] and type(codec)(CODECS[name]).info is CODECS[name]


@pytest.mark.parametrize("name", CODEC_IMPLS)
class TestCodec:
    def test_follows_the_protocol(self, name: str) -> None:
        assert isinstance(CODEC_IMPLS[name], Codec)

    def test_parts_take_exactly_the_bytes_of_the_catalogue(self, name: str) -> None:
        for shape in SIZES:
            parts = CODEC_IMPLS[name].allocate(shape, "cpu")
            held = sum(part.untyped_storage().nbytes() for part in parts.values())
            assert held == CODECS[name].nbytes(torch.Size(shape).numel()), shape
            packed = -(-torch.Size(shape).numel() // 2)  # two codes per byte have no shape of their own
            assert parts[""].shape == ((packed,) if CODECS[name].bits < 8 else shape)

    @pytest.mark.parametrize("shape", SIZES, ids=str)
    def test_decodes_to_fp32_of_its_shape(self, name: str, shape: tuple[int, ...]) -> None:
        values = sample(name, shape)
        for phase in (None, 0, 5):
            decoded = make(name, values, phase=phase)
            assert decoded.shape == shape and decoded.dtype is torch.float32
            if values.numel():
                cosine = torch.nn.functional.cosine_similarity(decoded.flatten(), values.flatten(), dim=0)
                assert cosine > LEAST_COSINE[CODECS[name].bits], phase

    @pytest.mark.parametrize("numel", [127, 128, 385])
    @pytest.mark.parametrize("phase", [None, 5])
    def test_in_parts_it_has_the_same_bits(
        self, name: str, phase: int | None, numel: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before, after = sample(name, (numel,)), sample(name, (numel,), seed=1)
        new = torch.arange(numel) % 3 > 0

        def stepped() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
            codec = CODEC_IMPLS[name]
            parts = codec.allocate((numel,), "cpu")
            codec.encode_(parts, before, phase=phase)
            codec.encode_(parts, after, phase=phase, new=new)
            return parts, codec.decode(parts, (numel,))

        whole, decoded = stepped()
        monkeypatch.setattr(codecs, "ELEMENTS_AT_ONCE", 128)
        in_parts, again = stepped()
        assert all(torch.equal(whole[part], in_parts[part]) for part in whole) and torch.equal(decoded, again)

    def test_starts_at_zero(self, name: str) -> None:
        codec = CODEC_IMPLS[name]
        assert not codec.decode(codec.allocate((65,), "cpu"), (65,)).any()

    def test_zero_stays_exactly_zero(self, name: str) -> None:
        values = sample(name, (256,))
        values[::3] = 0
        values[32:64] = 0  # a whole group
        for phase in PHASES:
            decoded = make(name, values, phase=phase)
            assert not decoded[::3].any() and not decoded[32:64].any(), phase

    def test_positive_v_never_becomes_zero(self, name: str) -> None:
        if name not in FOR_V:
            assert name in FOR_M  # a codec of m may round small numbers to zero
            return
        values = torch.logspace(-37, 0, 256)[torch.randperm(256, generator=torch.Generator().manual_seed(0))]
        assert [phase for phase in PHASES if not (make(name, values, phase=phase) > 0).all()] == []

    def test_nothing_non_finite_is_stored(self, name: str) -> None:
        values = sample(name, (96,))
        values[3], values[40], values[41] = torch.nan, torch.inf, -torch.inf
        if name == "fp32":
            assert torch.equal(make(name, values)[40:42], values[40:42])  # keeps what it is given, as torch does
            return
        for phase in (None, 3):
            decoded = make(name, values, phase=phase)
            assert decoded.isfinite().all()
            clean = values.nan_to_num(nan=0.0)
            assert torch.allclose(decoded[64:], make(name, clean, phase=phase)[64:])  # other groups see nothing of it
            assert decoded[3] == 0

    def test_infinities_are_the_largest_number_whatever_the_phase(self, name: str) -> None:
        values = torch.tensor([torch.inf, -torch.inf]).repeat_interleave(64)
        for phase in (*PHASES, *SHARP):
            decoded = make(name, values, phase=phase)
            if name == "fp32":
                assert torch.equal(decoded, values)
                continue
            assert decoded.isfinite().all() and (decoded[:64] >= (2.0**126 if name in FOR_V else 3.3e38)).all(), phase
            assert (decoded[64:] == (0 if name not in FOR_M else -decoded[:64])).all() or name == "softsign8", phase
            assert name in FOR_V or (decoded[64:] <= -3.3e38).all(), phase

    def test_a_default_device_and_type_of_the_users_change_nothing(self, name: str) -> None:
        codec, values, new = CODEC_IMPLS[name], sample(name, (96,)), torch.arange(96) % 3 > 0

        def stored(numel: int) -> list[torch.Tensor]:
            lanes.cache_clear()
            parts = codec.allocate((numel,), "cpu")
            codec.encode_(parts, values[:numel], phase=11, new=new[:numel])
            return [*parts.values(), codec.decode(parts, (numel,))]

        wanted = [stored(numel) for numel in (96, 0)]
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta"):
                found = [[t.detach() for t in stored(numel)] for numel in (96, 0)]
        finally:
            torch.set_default_dtype(torch.float32)
        for a, b in zip([*wanted[0], *wanted[1]], [*found[0], *found[1]], strict=True):
            assert a.device == b.device and a.dtype is b.dtype and torch.equal(a, b)

    def test_it_runs_where_the_values_are(self, name: str) -> None:
        codec = CODEC_IMPLS[name]
        parts = codec.allocate((100,), "meta")
        codec.encode_(parts, torch.ones(100, device="meta"), phase=3, new=torch.ones(100, device="meta").bool())
        assert codec.decode(parts, (100,)).device.type == "meta"

    def test_error_does_not_depend_on_the_scale(self, name: str) -> None:
        values = sample(name, (4096,))
        power = 2 if name in FOR_V - FOR_M else 1  # v of gradients times 10^k

        def error(scale: float) -> float:
            scaled = values * scale
            return float((make(name, scaled).double() - scaled.double()).norm() / scaled.double().norm())

        # The lattice of lattice4 does not move with the scale, so where numbers lie between its points does.
        most = (1.4 if name == "lattice4" else 1.1) * error(1.0) + 1e-7
        assert [exponent for exponent in range(-12, 9, 2) if error(10.0 ** (exponent * power)) > most] == []

    def test_the_same_phase_gives_the_same_bits_and_another_one_others(self, name: str) -> None:
        values = sample(name, (4096,))
        assert torch.equal(make(name, values, phase=7), make(name, values, phase=7))
        assert torch.equal(make(name, values, phase=7), make(name, values, phase=8)) == (name == "fp32")

    def test_strided_values_are_stored_as_their_contiguous_twins(self, name: str) -> None:
        values = sample(name, (16, 24)).t()
        for phase in (None, 4):
            assert torch.equal(make(name, values, phase=phase), make(name, values.contiguous(), phase=phase))

    def test_arguments_are_not_written_to(self, name: str) -> None:
        values = sample(name, (256,))
        kept = values.clone()
        make(name, values, phase=2)
        assert torch.equal(values, kept)


def test_thresholds_are_the_additive_sequence_in_double_precision() -> None:
    for phase in (0, 1, 7, *SHARP):
        exact = [1 - (lane * 0.5698402909980532 + phase * 0.7548776662466927) % 1 for lane in range(32)]
        wanted = torch.tensor([max(t, 2.0**-24) for t in exact], dtype=torch.float64).to(torch.float32)
        assert torch.equal(lanes(phase, torch.device("cpu")), wanted), phase
    assert min(exact) < 2.0**-25, "the last phase has a threshold that is held at its least"


def test_thresholds_are_spread_evenly_over_steps_and_lanes() -> None:
    table = torch.stack([lanes(step, torch.device("cpu")) for step in range(1000)])
    assert ((table > 0) & (table <= 1)).all()
    assert (table.mean(0) - 0.5).abs().max() < 0.01  # over steps, each lane
    assert (table.mean(1) - 0.5).abs().max() < 0.1  # over lanes, each step


@pytest.mark.parametrize("name", [name for name in CODEC_IMPLS if name not in ("fp32", "bf16")])
def test_what_is_kept_stays_whatever_the_phase(name: str) -> None:
    codec, numel = CODEC_IMPLS[name], 32 * 1024
    spread = torch.randn(numel, generator=torch.Generator().manual_seed(1)).exp()
    parts = codec.allocate((numel,), "cpu")
    codec.encode_(parts, sample(name, (numel,)) * spread)
    kept = codec.decode(parts, (numel,))
    before = {part: value.clone() for part, value in parts.items()}
    moved = 0
    for phase in SHARP:
        codec.encode_(parts, kept, phase=phase, new=torch.zeros(numel, dtype=torch.bool))
        assert torch.equal(codec.decode(parts, (numel,)), kept)
        if name != "lattice4":  # whose groups may count their codes from another top
            assert all(torch.equal(parts[part], value) for part, value in before.items())
        again = {part: value.clone() for part, value in before.items()}
        codec.encode_(again, kept, phase=phase)
        moved += int((codec.decode(again, (numel,)) != kept).sum())
    assert moved > 0, "the phases are not sharp, so nothing was tested"


@pytest.mark.parametrize("name", [name for name in CODEC_IMPLS if name not in ("fp32", "bf16")])
def test_only_what_is_kept_is_rounded_otherwise(name: str) -> None:
    codec, numel = CODEC_IMPLS[name], 1000
    values, new = sample(name, (numel,)), torch.ones(numel, dtype=torch.bool)
    new[::7] = False
    plain, masked = codec.allocate((numel,), "cpu"), codec.allocate((numel,), "cpu")
    codec.encode_(plain, values, phase=3)
    codec.encode_(masked, values, phase=3, new=new)
    a, b = codec.decode(plain, (numel,)), codec.decode(masked, (numel,))
    assert torch.equal(a[new], b[new]) and not torch.equal(a[~new], b[~new])


@pytest.mark.parametrize("layout", [StateLayout.FULL, StateLayout.PER_ROW])
@pytest.mark.parametrize(
    ("name", "kind", "phased"),
    [
        ("softsign8", StateKind.M, False),
        ("sqrt8", StateKind.V, True),
        ("root4", StateKind.M, True),
        ("bf16", StateKind.V, True),
        ("bf16", StateKind.M, False),
    ],
)
def test_a_state_is_rounded_by_the_phase_where_it_must_and_keeps_elements_where_it_has_them(
    name: str, kind: StateKind, phased: bool, layout: StateLayout
) -> None:
    """A mask is of the parameter's elements: a state of rows has none of its own."""
    values, codec = sample(name, (64,)), CODEC_IMPLS[name]
    state, new = codec.allocate((64,), "cpu"), torch.arange(64) % 2 == 0
    keys = tuple((part, part) for part in state)
    kept = StoredState(decl=StateDecl(name="x", kind=kind, layout=layout), codec=codec, shape=(64,), keys=keys)
    kept.encode_(state, values, phase=3, new=new)
    parts = codec.allocate((64,), "cpu")
    codec.encode_(parts, values, phase=3 if phased else None, new=new if layout is StateLayout.FULL else None)
    assert torch.equal(kept.decode(state), codec.decode(parts, (64,)))
