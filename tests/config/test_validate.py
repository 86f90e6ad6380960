"""Plain mappings into dataclasses: what is taken, and what is said of what is not."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from baoc.config.validate import OFF, build_settings
from baoc.errors import BadInputError


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: int = 1


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    mode: Annotated[Literal["off", "once"], OFF] = "once"
    rate: float = 0.1
    steps: int | None = None
    limit: int | float = 1.0
    clip: Literal["norm"] | bool | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    specs: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)


def test_values_arrive_in_the_types_of_the_schema():
    built = build_settings(
        Outer,
        {
            "name": "x",
            "rate": 2,
            "limit": 3,
            "betas": [0, 0.5],
            "specs": ["a"],
            "pairs": [["a", "b"]],
            "weights": {"w": 1},
            "options": {"any": [1]},
            "inner": {"depth": 4},
        },
    )
    assert built.rate == 2.0 and isinstance(built.rate, float)
    assert built.limit == 3 and isinstance(built.limit, int), "where both are allowed, a whole number stays one"
    assert built.betas == (0.0, 0.5) and built.specs == ("a",) and built.pairs == (("a", "b"),)
    assert built.weights == {"w": 1.0} and built.options == {"any": [1]} and built.inner == Inner(depth=4)
    assert built.steps is None and built.mode == "once", "what is absent takes its default"


def test_a_bare_off_of_yaml_is_taken_as_the_word():
    assert build_settings(Outer, {"name": "x", "mode": False}).mode == "off"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nam": "x"}, r"^unknown key nam; did you mean name\?\na run has: name, mode, rate"),
        (
            {"name": "x", "inner": {"dept": 1}},
            r"^unknown key inner.dept; did you mean inner.depth\?\ninner has: depth$",
        ),
        ({"name": "x", "zzz": 1}, r"^unknown key zzz\na run has: "),
        ({}, r"^name is missing"),
        ({"name": 3}, r"^name=3 is not allowed: it must be text$"),
        ({"name": "x", "rate": "fast"}, r"^rate=fast is not allowed: it must be a number$"),
        ({"name": "x", "rate": True}, r"^rate=true is not allowed: it must be a number$"),
        ({"name": "x", "steps": 1.5}, r"^steps=1.5 is not allowed: it must be a whole number or null$"),
        ({"name": "x", "limit": None}, r"^limit=null is not allowed: it must be a whole number or a number$"),
        ({"name": "x", "mode": "onec"}, r"^mode=onec is not allowed: choose mode=off\|once; did you mean once\?$"),
        ({"name": "x", "mode": True}, r"^mode=true is not allowed"),
        ({"name": "x", "clip": "value"}, r"^clip=value is not allowed: it must be norm or true or false or null$"),
        ({"name": "x", "betas": [0.9]}, r"^betas=\[0.9\] is not allowed: it must be a list of 2: a number, a number$"),
        ({"name": "x", "specs": "adamw"}, r"^specs=adamw is not allowed: it must be a list, each entry text$"),
        ({"name": "x", "specs": [1]}, r"^specs\[0\]=1 is not allowed: it must be text$"),
        ({"name": "x", "weights": {"w": "a"}}, r"^weights.w=a is not allowed: it must be a number$"),
        ({"name": "x", "weights": 1}, r"^weights=1 is not allowed: it must be a group of keys$"),
        ({"name": "x", "inner": 5}, r"^inner must be a group of keys, not 5$"),
    ],
)
def test_a_refusal_names_the_key_and_what_is_allowed(given, message: str):
    with pytest.raises(BadInputError, match=message):
        build_settings(Outer, given)


def test_complete_asks_for_every_field_at_every_level():
    whole = {item: getattr(Outer(name="x"), item) for item in Outer.__dataclass_fields__}
    whole["inner"] = {"depth": 1}
    assert build_settings(Outer, whole, complete=True) == Outer(name="x")
    with pytest.raises(BadInputError, match=r"inner\.depth is missing: it was removed"):
        build_settings(Outer, {**whole, "inner": {}}, complete=True)
