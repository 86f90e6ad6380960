"""The catalogue's rows: what a byte of each storage buys, names that fit together, and selection."""

import re

import pytest

from baoc.core.catalogue import (
    CODECS,
    NATIVE,
    ON_DEVICE,
    ON_HOST,
    SPECS,
    STORAGES,
    WEIGHTS,
    base_name,
    removal_message,
    select,
    with_placement,
    with_weights,
)
from baoc.core.rule_tags import RULE_INFOS
from baoc.errors import BadInputError
from baoc.planning.risk import CODEC_DOSE
from baoc.types import Placement


@pytest.mark.parametrize(
    ("codec", "numel", "nbytes"),
    [
        ("fp32", 7, 28),
        ("bf16", 7, 14),
        ("softsign8", 32, 34),
        ("softsign8", 33, 37),  # a second scale for one element
        ("sqrt8", 1, 3),
        ("root8m", 64, 68),
        ("root8v", 0, 0),
        ("root8v", 33, 37),
        ("root4", 64, 34),
        ("root4", 65, 37),  # half a byte more is a byte, and a second scale
        ("lattice4", 1, 3),
    ],
)
def test_codec_bytes(codec: str, numel: int, nbytes: int):
    assert CODECS[codec].nbytes(numel) == nbytes


def test_every_row_names_what_exists_and_says_what_it_is():
    for name, spec in SPECS.items():
        assert spec.name == name
        assert spec.rule in RULE_INFOS
        base = spec.rule if spec.storage == "fp32" else f"{spec.rule}_{spec.storage}"
        assert base_name(name) == base
        text, suffix = spec.description, "@streamed" if spec.placement == Placement.HOST_STREAMED else ""
        if suffix:
            text, _, where = text.partition("; states ")
            assert where == "on the host, stepped on the device"
        weighted = base if spec.weights == "native" else f"{base}+{spec.weights}"
        assert name == f"{weighted}{suffix}"
        assert text.endswith(
            STORAGES[spec.storage].name if spec.weights == "native" else WEIGHTS[spec.weights].description
        )
        assert "\n" not in spec.description
    for storage in STORAGES.values():
        assert {storage.m, storage.v} <= set(CODECS)
    assert set(CODEC_DOSE) == set(CODECS), "a codec without a risk"


def test_the_rows_that_the_issue_asks_for_are_there():
    asked = {
        *("adamw", "adamw_bf16", "adamw_int8", "rmsprop", "rmsprop_bf16", "rmsprop_int8"),
        *("adamw_shared_in", "adamw_shared_out_int8", "adafactor", "adafactor_momentum", "adafactor_momentum_int8"),
        *("lion", "lion_int8", "lion_bf16", "signum", "signum_int8", "foam_l1", "foam_l2_int8"),
        *("sign", "column_norm", "muon", "muon_int8"),
        *("adamw_int4", "rmsprop_int4", "lion_int4", "adamw_shared_in_int4", "adamw_int8_root"),
    }
    assert asked <= set(SPECS)


def test_select_takes_names_and_globs_in_catalogue_order():
    assert list(select(["sign", "adamw"])) == ["adamw", "sign"]
    assert list(select(["foam_l2*"])) == ["foam_l2", "foam_l2_int8"]
    assert select(["*"]) == NATIVE


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("foam_l2_out", "foam_l2"),
        ("foam_l3_sq_int8", "foam_l3_int8"),
        ("foam_l8", "foam_l3"),
        ("foam_l8_out_int8+split8@streamed", "foam_l3_int8+split8@streamed"),
        ("foam_l1_out_int8+split8", "foam_l1_int8+split8"),
    ],
)
def test_rows_of_before_are_told_with_the_nearest_of_today(name: str, instead: str):
    assert instead in SPECS and name not in SPECS
    with pytest.raises(BadInputError, match=rf"^{re.escape(name)} was removed, FOAM .* choose {re.escape(instead)}\."):
        select([name])
    assert not any(map(removal_message, SPECS))


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("adamw@updated", "adamw@streamed"),
        ("lion_int8+split8@updated", "lion_int8+split8@streamed"),
        ("adamw_int8+split16", "adamw_int8+split8"),
        ("sign+split16@streamed", "sign+split8@streamed"),
        ("adamw+split16@updated", "adamw+split8@streamed"),
        ("lion_int8_log+bf16", "lion_int8_root+bf16"),
        ("uniform_foam_l8_matched", "allocator=uniform_foam_l3_matched"),
        ("uniform_adamw8bit_log", "allocator=uniform_adamw8bit_root"),
        ("host_every_kth", "catalogue=host"),
        ("shadow", "risk=statistics"),
    ],
)
def test_what_was_removed_is_told_with_what_is_in_its_place(name: str, instead: str):
    told = removal_message(name)
    assert f"{name} was removed" in told and instead in told and name not in SPECS
    if "=" not in told.partition(" was removed")[0]:  # a row
        with pytest.raises(BadInputError, match=f"^{re.escape(told)}$"):
            select([name])


def test_weights_are_selected_only_where_they_are_asked_for():
    assert {spec.weights for spec in select(["*+*"]).values()} == {"split8", "bf16_sr"}, "bf16 is named"
    assert list(select(["lion*+bf16", "sign"])) == [
        *("sign", "lion+bf16", "lion_bf16+bf16", "lion_int8+bf16", "lion_int8_root+bf16"),
        "lion_int4+bf16",
    ]
    assert list(select(["adamw_int8+split*"])) == ["adamw_int8+split8"]
    assert len(ON_DEVICE) == len(NATIVE) * len(WEIGHTS)
    with pytest.raises(BadInputError, match=r"matches 'adamw\+split4' \(close: adamw\+split"):
        select(["adamw+split4"])


def test_a_row_finds_its_twin_with_other_weights():
    for spec in ("adamw_int8", "adamw_int8+split8"):
        assert with_weights(SPECS[spec], "bf16_sr") == SPECS["adamw_int8+bf16_sr"]
        assert with_weights(SPECS[spec], "native") == SPECS["adamw_int8"]


def test_places_are_selected_only_where_they_are_asked_for():
    assert {spec.placement for spec in select(["*", "*+*"]).values()} == {"device"}
    assert list(select(["adamw_int8@*", "lion"])) == ["lion", "adamw_int8@streamed"]
    assert list(select(["adamw_int8+split*@*"])) == ["adamw_int8+split8@streamed"]
    assert {spec.weights for spec in select(["*@streamed"]).values()} == {"native"}
    assert "bf16" not in {spec.weights for spec in select(["*+*@*"]).values()}, "bf16 is named, on the host as well"
    with pytest.raises(BadInputError, match=r"matches 'adamw@stream' \(close: adamw@streamed"):
        select(["adamw@stream"])


def test_a_row_that_keeps_nothing_has_nothing_to_place():
    """Only corrections of the weights give a stateless rule something that may live on the host."""
    kept = {(spec.rule, spec.weights) for spec in ON_HOST.values()}
    for spec in ON_DEVICE.values():
        keeps = bool(RULE_INFOS[spec.rule].states or WEIGHTS[spec.weights].correction_bytes)
        assert ((spec.rule, spec.weights) in kept) == keeps, spec.name


def test_a_row_finds_its_twin_elsewhere():
    for spec in ("adamw_int8+split8", "adamw_int8+split8@streamed"):
        assert with_placement(SPECS[spec], "host_streamed") == SPECS["adamw_int8+split8@streamed"]
        assert with_placement(SPECS[spec], "device") == SPECS["adamw_int8+split8"]
        assert with_weights(with_placement(SPECS[spec], "host_streamed"), "native") == SPECS["adamw_int8@streamed"]


def test_select_refuses_what_matches_nothing():
    with pytest.raises(BadInputError, match=r"no .* spec is called or matches 'adamv' \(close: adamw.*--list specs"):
        select(["adamw", "adamv"])
