"""Values that were written as JSON are read again, and whatever else a file holds is told by where it is."""

import json
import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from baoc.types import Footprint, LatencyTable, LinkRates, Option, PeakInterval, read_plain, to_plain

FOOTPRINT = Footprint(
    device="cpu",
    micro_batch=2,
    weights_bytes=1,
    gradients_bytes=2,
    forward_backward_bytes=3,
    validation_bytes=4,
    resident_bytes=5,
    step_temporary_bytes={"adamw": 7},
    intervals=(PeakInterval(name="a", num_bytes=3, gradients=None, copies={"w": 2}),),
    gradient_order=("w",),
)
LINK = LinkRates(sizes=(1, 2), in_rates=(1.0, 2.0), out_rates=(1.0, 2.0), both_rates=(1.0, 2.0), source="measured")
TABLE = LatencyTable(device="cpu", fixed_s={"adamw": 0.5}, per_element_s={"adamw": 1e-9}, assumed=("sign",), link=LINK)
OPTION = Option(micro_batch=1, accumulation=2, recomputed=3, num_layers=4, release=True, risk=0.5)


@pytest.mark.parametrize("value", [FOOTPRINT, TABLE, OPTION], ids=lambda value: type(value).__name__)
def test_what_was_written_is_read(value: Any) -> None:
    plain = json.loads(json.dumps(to_plain(value)))
    assert repr(read_plain(type(value), plain)) == repr(value)  # nan is not equal to itself


def test_a_set_is_written_in_one_order() -> None:
    assert to_plain({"chosen": frozenset("hgfedcba")}) == {"chosen": list("abcdefgh")}


@dataclass(frozen=True, kw_only=True)
class Part:
    a: int


@dataclass(frozen=True, kw_only=True)
class Whole:
    number: float
    flag: bool = False
    part: Part | None = None
    parts: tuple[Part, ...] = ()
    pair: tuple[float, int] = (0.0, 0)
    named: dict[str, Any] = field(default_factory=dict[str, Any])


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (3, "it is 3, not Whole"),
        (None, "it is None, not Whole"),
        ({}, "it lacks number"),
        ({"number": "1"}, "number is '1', not float"),
        ({"number": True}, "number is True, not float"),
        ({"number": 1, "flag": 1}, "flag is 1, not bool"),
        ({"number": 1, "part": {"b": 1}}, "part lacks a"),
        ({"number": 1, "part": {"a": 1.5}}, r"part\.a is 1\.5, not int"),
        ({"number": 1, "parts": [{"a": 1}, 2]}, r"parts\.1 is 2, not Part"),
        ({"number": 1, "parts": {"a": 1}}, r"parts is \{'a': 1\}, not tuple"),
        ({"number": 1, "pair": [1.0]}, r"pair is \[1\.0\], not tuple"),
        ({"number": 1, "pair": [1.0, 1.0]}, r"pair\.1 is 1\.0, not int"),
    ],
)
def test_what_is_of_another_type_is_told_by_its_place(data: Any, told: str) -> None:
    with pytest.raises(ValueError, match=f"^{told}"):
        read_plain(Whole, data, partial=True)


def test_absent_and_unknown_keys() -> None:
    read = read_plain(Whole, {"number": None, "unknown": 3, "part": {}}, partial=True)
    assert math.isnan(read.number) and read.part is None and read.parts == ()
    with pytest.raises(ValueError, match=r"^it lacks flag, parts, pair, named$"):
        read_plain(Whole, {"number": 1, "part": None})
