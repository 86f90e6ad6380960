"""Every setting of a run and of a study against values that it cannot have: one sentence, before anything trains."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from baoc.config.from_hydra import from_plain, to_conf
from baoc.config.options import GROUPS
from baoc.config.schema import RunConfig
from baoc.errors import BadInputError
from baoc.sweep.study_config import Domain, EarlyStop, StudyConfig, read_study

HUGE = int("9" * 400)
VALUES: Mapping[str, Any] = {
    "null": None,
    "true": True,
    "text": "no such value",
    "number": 0.12345,
    "list": [[]],
    "group": {"a": 1},
    "huge": HUGE,
    "infinite": float("inf"),
    "surrogate": "\udc80",
}
SAID = (
    "is not allowed",
    "must be",
    "cannot",
    "there is no",
    "unknown key",
    "is no ",
    "need",
    "has no ",
    "give ",
    "leave it out",
)
SENTENCE = re.compile("|".join((*SAID, "digits", "below", "allowed are")))
TAKEN = (("budget", "number"), ("budget.name", "null"))  # a share of state; no name
STUDY = {"name": "s", "objectives": {"quality": "minimize"}, "space": {"x": {"low": 0, "high": 1}}}


def leaves(node: Mapping[str, Any], *, path: str = "") -> Iterator[str]:
    for name, value in node.items():
        yield f"{path}{name}"
        if isinstance(value, Mapping) and name not in ("weights", "options"):
            yield from leaves(value, path=f"{path}{name}.")


def nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def allowed(hint: Any, value: Any) -> bool:
    """Whether a value is of a type, roughly: what is allowed need not be refused."""
    if hint is Any:
        return True
    if hasattr(hint, "__metadata__"):
        return allowed(hint.__origin__, value)
    items = get_args(hint)
    if get_origin(hint) is None:
        return type(value) is hint or (hint is float and type(value) is int) or (hint is type(None) and value is None)
    if isinstance(get_origin(hint), type) and issubclass(get_origin(hint), Mapping):
        return isinstance(value, Mapping)
    return any(allowed(item, value) for item in items) if get_origin(hint) is not tuple else isinstance(value, list)


def hint_of(cls: Any, key: str) -> Any:
    hint: Any = cls
    for name in key.split("."):
        if not is_dataclass(hint) or name not in (hints := get_type_hints(hint, include_extras=True)):
            return Any
        hint = hints[name]
    return hint


def refused(message: str, *, key: str) -> None:
    lines = message.splitlines()
    assert len(lines) <= 2 and len(lines[0]) < 600, message
    assert SENTENCE.search(message), message
    words = [name for part in key.split(".") for name in (part, part.replace("_", " "))]
    assert any(word in message for word in (*words, "fraction")), message


@pytest.mark.parametrize("key", list(leaves(to_conf(RunConfig()))))
def test_a_setting_of_a_run(key: str) -> None:
    hint = hint_of(RunConfig, key.replace("budget.schedule", "dynamics.schedule").replace("budget.rel", "dynamics.rel"))
    for name, value in VALUES.items():
        must = not allowed(hint, value) or name in ("huge", "surrogate", "infinite")
        must = must and (key, name) not in TAKEN
        try:
            from_plain(nested(key, value))
        except BadInputError as error:
            refused(str(error), key=key)
        else:
            assert not must, f"{key} took {name}"
    with pytest.raises(BadInputError, match=r"unknown key|has no key|there is no|must be|is not allowed"):
        from_plain(nested(f"{key}x", 1))


@pytest.mark.parametrize(
    "key",
    [
        *(item.name for item in fields(StudyConfig)),
        *(f"early_stop.{item.name}" for item in fields(EarlyStop)),
        *(f"space.x.{item.name}" for item in fields(Domain)),
    ],
)
def test_a_setting_of_a_study(key: str) -> None:
    cls = Domain if key.startswith("space.") else StudyConfig
    hint = hint_of(cls, key.removeprefix("space.x."))
    for name, value in VALUES.items():
        given = {**STUDY, "space": {"x": dict(STUDY["space"]["x"])}}  # type: ignore[index]
        if key.startswith("space."):
            given["space"]["x"][key.rpartition(".")[2]] = value
        else:
            given |= nested(key, value)
        must = (not allowed(hint, value) and value is not None) or name in ("huge", "surrogate")
        try:
            read_study(given)
        except BadInputError as error:
            refused(str(error), key=key)
        else:
            assert not must, f"{key} took {name}"
    with pytest.raises(BadInputError, match=r"unknown key"):
        read_study({**STUDY, "early_stop": {"rungx": 1}} if "early" in key else {**STUDY, f"{key.split('.')[0]}x": 1})


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_of_options(group: str) -> None:
    for value in VALUES.values():
        with pytest.raises(BadInputError, match=rf"{group}"):
            from_plain({group: value})
