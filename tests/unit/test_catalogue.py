"""The catalogue's rows: what a byte of each storage buys, names that fit together, and selection."""

import pytest

from baoc.catalogue import CODECS, SPECS, STORAGES, select
from baoc.errors import BadInputError
from baoc.risk import CODEC_DOSE
from tests.decision import RULES


@pytest.mark.parametrize(
    ("codec", "numel", "nbytes"),
    [
        ("fp32", 7, 28),
        ("bf16", 7, 14),
        ("softsign8", 32, 34),
        ("softsign8", 33, 37),  # a second scale for one element
        ("sqrt8", 1, 3),
        ("log8m", 64, 68),
        ("log8v", 0, 0),
    ],
)
def test_codec_bytes(codec: str, numel: int, nbytes: int):
    assert CODECS[codec].nbytes(numel) == nbytes


def test_every_row_names_what_exists_and_says_what_it_is():
    for name, spec in SPECS.items():
        assert spec.name == name
        assert spec.rule in RULES
        assert name == (spec.rule if spec.storage == "fp32" else f"{spec.rule}_{spec.storage}")
        assert spec.description.endswith(STORAGES[spec.storage].name)
        assert "\n" not in spec.description
    for storage in STORAGES.values():
        assert {storage.m, storage.v} <= set(CODECS)
    assert set(CODEC_DOSE) == set(CODECS), "a codec without a risk"


def test_the_rows_that_the_issue_asks_for_are_there():
    asked = {
        *("adamw", "adamw_bf16", "adamw_int8", "adamw_int8_log", "rmsprop", "rmsprop_bf16", "rmsprop_int8"),
        *("adamw_shared_in", "adamw_shared_out_int8", "adafactor", "adafactor_momentum", "adafactor_momentum_int8"),
        *("lion", "lion_int8", "lion_bf16", "signum", "signum_int8", "foam_l1", "foam_l2_int8", "foam_l8"),
        *("foam_l2_out", "foam_l3_out_int8", "sign"),
    }
    assert asked <= set(SPECS)


def test_select_takes_names_and_globs_in_catalogue_order():
    assert list(select(["sign", "adamw"])) == ["adamw", "sign"]
    assert list(select(["foam_l2*"])) == ["foam_l2", "foam_l2_int8", "foam_l2_out", "foam_l2_out_int8"]
    assert select(["*"]) == SPECS


def test_select_refuses_what_matches_nothing():
    with pytest.raises(BadInputError, match=r"no .* spec is called or matches 'adamv' \(close: adamw.*--list specs"):
        select(["adamw", "adamv"])
