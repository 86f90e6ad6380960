"""What a study is: its objectives, the space it searches, its baselines, and how many trials run at once."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from baoc.errors import BadInputError, unknown_name

OBJECTIVES = {"quality": None, "peak_bytes": "minimize", "state_bytes": "minimize", "samples_per_s": "maximize"}
SAMPLERS = ("tpe", "nsgaii", "gp", "random", "grid")
_KEYS = ("choices", "low", "high", "log", "step", "format", "when")
_MINIMUM = (("n_trials", 1), ("workers", 1), ("threads", 1), ("retries", 0), ("per_gpu", 1), ("stall_s", 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One searched setting: choices, or a range of numbers. `format` turns a value into the text of an override. `when`
    maps earlier settings of the space to the values with which this one is active."""

    key: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None
    format: str = "{}"
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def override(self, value: Any) -> str:
        """The override `key=value` of a value."""
        return f"{self.key}={self._text(value)}"

    def _text(self, value: Any) -> str:
        return "null" if value is None else self.format.format(value)

    def value_of(self, text: str | None) -> Any:
        """The value that `override` writes as `text`; None if no value of the space is written so."""
        if text is None:
            return None
        if self.choices:
            return next((choice for choice in self.choices if self._text(choice) == text), None)
        parts = re.split(r"\{[^}]*\}", self.format)
        if len(parts) != 2 or not (text.startswith(parts[0]) and text.endswith(parts[1])):
            return None
        try:
            value = float(text[len(parts[0]) : len(text) - len(parts[1])])
        except ValueError:
            return None
        is_int = isinstance(self.low, int) and isinstance(self.high, int)
        if not self.low <= value <= self.high or (is_int and value != int(value)):
            return None
        return int(value) if is_int else value

    def is_active(self, chosen: Mapping[str, Any]) -> bool:
        """Whether the setting is searched beside the values `chosen` so far."""
        return all(key in chosen and chosen[key] in values for key, values in self.when.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStop:
    """A trial ends at a rung where another one was better in every objective, in quality by `margin` of its own value.
    `rungs` are optimizer steps at which the run validates and logs `metric`, the key of its quality. `least` is the
    number of other trials that must have passed the rung before one is ended there. A `margin` of 0.1 is a tenth."""

    rungs: tuple[int, ...] = ()
    metric: str = "val/loss"
    margin: float = 0.1
    least: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyConfig:
    """`sweeps/NAME.yaml`.

    `objectives` maps a result's field to minimize or maximize. `fixed` are overrides of every trial; `baselines` are
    lists of overrides that are tried first. With `repeats`, a trial runs once with each of these lists of overrides,
    and its values are joined as for seeds. `n_trials` is the total over all starts.

    `retries` is how often a run that was killed, failed through a bug or hung is started again; it hangs if it has
    written neither a metric nor a line for `stall_s` seconds (0 disables this). `storage`: null is sqlite in the
    study's folder, `journal` a journal file there, else a database URL. `gpus`: `auto` or indices; `per_gpu` trials
    share a GPU if their memory budgets fit it together.
    """

    name: str
    objectives: Mapping[str, str]
    space: tuple[Param, ...]
    fixed: tuple[str, ...] = ()
    baselines: tuple[tuple[str, ...], ...] = ()
    repeats: tuple[tuple[str, ...], ...] = ()
    sampler: str = "tpe"
    seed: int = 0
    n_trials: int = 20
    workers: int = 1
    threads: int = 1  # of torch, per trial
    retries: int = 1
    stall_s: int = 1800
    early_stop: EarlyStop = field(default_factory=EarlyStop)
    storage: str | None = None
    gpus: str | tuple[str, ...] = "auto"
    per_gpu: int = 1

    def definition(self) -> dict[str, Any]:
        """The settings that make trials comparable: a study resumes only with the same ones."""
        known = {
            "objectives": dict(self.objectives),
            "space": {p.key: {k: _plain(getattr(p, k)) for k in _KEYS if k != "when" or p.when} for p in self.space},
            "fixed": list(self.fixed),
        }
        return known | ({"repeats": [list(words) for words in self.repeats]} if self.repeats else {})


def read_study(given: Any) -> StudyConfig:
    """A StudyConfig from plain values (hydra.sweeper). Raises BadInputError that names the key."""
    values = {key: value for key, value in dict(given).items() if key != "_target_"}
    known = [item.name for item in fields(StudyConfig)]
    for key in values:
        if key not in known:
            raise unknown_name(key, what="setting of a study (hydra.sweeper)", allowed=known)
    for key in ("name", "objectives", "space"):
        if not values.get(key):
            raise BadInputError(f"the study has no hydra.sweeper.{key}: choose one with sweeps=NAME, or give it")
    sampler = values.get("sampler", "tpe")
    if sampler not in SAMPLERS:
        raise unknown_name(str(sampler), what="sampler", allowed=SAMPLERS)
    for key, least in _MINIMUM:
        if not isinstance(values.get(key, 1), int) or values.get(key, 1) < least:
            raise BadInputError(f"hydra.sweeper.{key}={values[key]}: give a whole number of at least {least}")
    values["objectives"] = _objectives(values["objectives"])
    values["space"] = _space(values["space"], sampler=sampler)
    values["fixed"] = tuple(map(str, values.get("fixed", ())))
    for key in ("baselines", "repeats"):
        values[key] = tuple(tuple(map(str, words)) for words in values.get(key) or ())
    values["early_stop"] = _early_stop(values.get("early_stop") or {})
    gpus = values.get("gpus", "auto")
    values["gpus"] = gpus if isinstance(gpus, str) else tuple(map(str, gpus or ()))
    return StudyConfig(**values)


def _objectives(given: Any) -> dict[str, str]:
    objectives = {str(name): str(direction) for name, direction in dict(given).items()}
    for name, direction in objectives.items():
        if name not in OBJECTIVES:
            raise unknown_name(name, what="objective", allowed=OBJECTIVES)
        if direction not in ("minimize", "maximize") or OBJECTIVES[name] not in (None, direction):
            raise BadInputError(
                f"objective {name} is {direction!r}: allowed is {OBJECTIVES[name] or 'minimize or maximize'}"
            )
    return objectives


def _space(given: Any, *, sampler: str) -> tuple[Param, ...]:
    params: dict[str, Param] = {}
    for key, spec in _dotted(given).items():
        param = _param(str(key), spec, sampler=sampler)
        for name in param.when:
            if name not in params:
                raise BadInputError(
                    f"hydra.sweeper.space.{key}.when names {name}: allowed are settings of the space that stand before "
                    f"it ({', '.join(params) or 'there are none'})"
                )
            choices = params[name].choices
            if not set(map(str, choices or param.when[name])) & set(map(str, param.when[name])):
                raise BadInputError(
                    f"hydra.sweeper.space.{key}.when.{name} is {list(param.when[name])}, of which none is ever drawn: "
                    f"{name} has {', '.join(map(str, choices)) or 'a range'}"
                )
        params[param.key] = param
    return tuple(params.values())


def _dotted(given: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Maps dotted keys to ranges or choices. A command line can only nest keys
    (++hydra.sweeper.space.optim.lr.low=0.001) that a file writes with dots; both are merged. Choices and a range
    replace each other."""
    found: dict[str, Any] = {}
    for key, spec in given.items():
        nested = isinstance(spec, Mapping) and spec and not set(_KEYS) & set(spec)
        if nested and all(isinstance(value, Mapping) for value in spec.values()):
            own = _dotted(spec, prefix=f"{prefix}{key}.")
        else:
            own = {f"{prefix}{key}": spec}
        for name, values in own.items():
            known = found.get(name)
            if not isinstance(known, Mapping) or not isinstance(values, Mapping):
                found[name] = values
                continue
            same_sort = ("choices" in values) == ("choices" in known) or not {"choices", "low", "high"} & set(values)
            found[name] = {**{k: item for k, item in known.items() if same_sort or k in ("when", "format")}, **values}
    return found


def _param(key: str, spec: Any, *, sampler: str) -> Param:
    if not isinstance(spec, Mapping) or not ("choices" in spec or {"low", "high"} <= set(spec)):
        raise BadInputError(f"hydra.sweeper.space.{key} is {spec!r}: give choices, or low and high")
    for name in spec:
        if name not in _KEYS:
            raise unknown_name(str(name), what=f"setting of hydra.sweeper.space.{key}", allowed=_KEYS)
    if "choices" not in spec:
        if not spec["low"] < spec["high"] or (spec.get("log") and spec["low"] <= 0):
            raise BadInputError(
                f"hydra.sweeper.space.{key} goes from {spec['low']} to {spec['high']}: low must be below high, and "
                "above 0 with log"
            )
        if sampler == "grid":
            raise BadInputError(f"the grid sampler needs choices, and hydra.sweeper.space.{key} is a range")
    tuples: dict[str, Any] = {"choices": tuple(spec["choices"])} if "choices" in spec else {}
    tuples["when"] = {str(name): _tuple(values) for name, values in dict(spec.get("when") or {}).items()}
    param = Param(key=key, **{**spec, **tuples})
    try:
        for value in param.choices or (param.low, param.high):
            param.override(value)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise BadInputError(
            f"hydra.sweeper.space.{key}.format={param.format!r} does not write its values ({error}): give one place "
            "for the value, such as state_{:.3g} for numbers or {} for any"
        ) from error
    return param


def _early_stop(given: Mapping[str, Any]) -> EarlyStop:
    known = [item.name for item in fields(EarlyStop)]
    for key in given:
        if key not in known:
            raise unknown_name(str(key), what="setting of hydra.sweeper.early_stop", allowed=known)
    rungs = tuple(given.get("rungs") or ())
    if any(not isinstance(rung, int) or rung < 1 for rung in rungs) or list(rungs) != sorted(set(rungs)):
        raise BadInputError(
            f"hydra.sweeper.early_stop.rungs={list(rungs)}: give rising optimizer steps at which a run validates"
        )
    for key, least in (("margin", 0), ("least", 1)):
        if not isinstance(given.get(key, least), int | float) or given.get(key, least) < least:
            raise BadInputError(f"hydra.sweeper.early_stop.{key}={given[key]}: give a number of at least {least}")
    return EarlyStop(**{**given, "rungs": rungs})


def _tuple(values: Any) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, Sequence) and not isinstance(values, str) else (values,)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
