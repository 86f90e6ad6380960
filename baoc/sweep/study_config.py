"""What a study is: its objectives, the space it searches, its baselines, and how many trials run at once."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from baoc.config.validate import ABOVE_0, FROM_0, Allowed, at_least, build_settings, plain_text, refuse_unwritable
from baoc.errors import BadInputError, unknown_name

OBJECTIVES = {"quality": None, "peak_bytes": "minimize", "state_bytes": "minimize", "samples_per_s": "maximize"}
PATH = "hydra.sweeper"  # where the command line has a study's settings
DEVICES = "trainer.devices"  # of a trial, which `gpus_per_trial` sets
MOST_WORKERS = 1024
_LISTS = ("fixed", "baselines", "repeats", "early_stop")  # which null empties


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """Choices, or a range of numbers. `format` turns a value into the text of an override. `when` maps earlier settings
    of the space to the values with which this one is active."""

    choices: Annotated[tuple[Any, ...], Allowed("a list of at least one value", min_length=1)] = ()
    low: int | float = 0.0
    high: int | float = 0.0
    log: bool = False
    step: Annotated[int, ABOVE_0] | Annotated[float, ABOVE_0] | None = None
    format: str = "{}"
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.choices:
            texts = list(map(str, self.choices))
            if twice := next((text for text in texts if texts.count(text) > 1), None):
                raise ValueError(f"has the choice {twice} twice: leave one out")
            return
        low, high, step = self.low, self.high, self.step
        if not low < high or (self.log and low <= 0):
            raise ValueError(f"goes from {low} to {high}: low must be below high, and above 0 with log")
        if step is not None and self.log:
            raise ValueError(f"has log=true and step={step}: a logarithmic range has no steps, leave one out")
        if step is not None and (step > high - low or (self.is_whole and step != int(step))):
            fitting = "a whole number of" if self.is_whole else "a number of"
            raise ValueError(f"has step={step}: give {fitting} at most high - low = {high - low}")

    @property
    def is_whole(self) -> bool:
        """Whether a range is one of whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Param(Domain):
    """One searched setting."""

    key: str

    def plain(self) -> dict[str, Any]:
        """What is stored of it."""
        return {name: _plain(getattr(self, name)) for name in DOMAIN_KEYS if name != "when" or self.when}

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
        if not self.low <= value <= self.high or (self.is_whole and value != int(value)):
            return None
        return int(value) if self.is_whole else value

    def is_active(self, chosen: Mapping[str, Any]) -> bool:
        """Whether the setting is searched beside the values `chosen` so far."""
        return all(key in chosen and chosen[key] in values for key, values in self.when.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStop:
    """A trial ends at a rung where another one was better in every objective, in quality by `margin` of its own value.
    `rungs` are optimizer steps at which the run validates and logs `metric`, the key of its quality. `least` is the
    number of other trials that must have passed the rung before one is ended there. A `margin` of 0.1 is a tenth."""

    rungs: tuple[Annotated[int, at_least(1, " steps")], ...] = ()
    metric: str = "val/loss"
    margin: Annotated[float, FROM_0] = 0.1
    least: Annotated[int, at_least(1, " trials")] = 4

    def __post_init__(self) -> None:
        if list(self.rungs) != sorted(set(self.rungs)):
            raise ValueError(f"has rungs={list(self.rungs)}: give rising optimizer steps at which a run validates")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyConfig:
    """`sweeps/NAME.yaml`.

    `objectives` maps a result's field to minimize or maximize. `fixed` are overrides of every trial; `baselines` are
    lists of overrides that are tried first. With `repeats`, a trial runs once with each of these lists of overrides,
    and its values are joined as for seeds. `n_trials` is the total over all starts.

    `retries` is how often a run that was killed, failed through a bug or hung is started again; it hangs if it has
    written neither a metric nor a line for `stall_s` seconds (0 disables this). `storage`: null is sqlite in the
    study's folder, `journal` a journal file there, else a database URL. `gpus`: `auto` or indices; `per_gpu` trials
    share a GPU if their memory budgets fit it together; a trial trains on `gpus_per_trial` of them by as many ranks,
    without GPUs in as many processes.
    """

    name: Annotated[str, Allowed("the name of the study", min_length=1)]
    objectives: Mapping[str, Literal["minimize", "maximize"]]
    space: tuple[Param, ...]
    fixed: tuple[str, ...] = ()
    baselines: tuple[tuple[str, ...], ...] = ()
    repeats: tuple[tuple[str, ...], ...] = ()
    sampler: Literal["tpe", "nsgaii", "gp", "random", "grid"] = "tpe"
    seed: Annotated[int, at_least(0)] = 0
    n_trials: Annotated[int, at_least(1, " trials")] = 20
    workers: Annotated[int, Allowed(f"1 to {MOST_WORKERS} processes", ge=1, le=MOST_WORKERS)] = 1
    threads: Annotated[int, Allowed(f"1 to {MOST_WORKERS} threads", ge=1, le=MOST_WORKERS)] = 1  # per trial
    retries: Annotated[int, at_least(0)] = 1
    stall_s: Annotated[int, at_least(0, " seconds")] = 1800
    early_stop: EarlyStop = field(default_factory=EarlyStop)
    storage: str | None = None
    gpus: str | tuple[str, ...] = "auto"
    per_gpu: Annotated[int, at_least(1, " trials")] = 1
    gpus_per_trial: Annotated[int, at_least(1, " GPUs")] = 1

    def definition(self) -> dict[str, Any]:
        """The settings that make trials comparable: a study resumes only with the same ones."""
        known = {
            "objectives": dict(self.objectives),
            "space": {param.key: param.plain() for param in self.space},
            "fixed": list(self.fixed),
        }
        return known | ({"repeats": [list(words) for words in self.repeats]} if self.repeats else {})


def read_study(given: Mapping[str, Any]) -> StudyConfig:
    """A StudyConfig from plain values (hydra.sweeper). Raises BadInputError that names the key."""
    refuse_unwritable(given, key=PATH)
    values = {key: value for key, value in given.items() if key != "_target_"}
    values = {key: value for key, value in values.items() if not (value is None and key in _LISTS)}
    if not isinstance(gpus := values.get("gpus", "auto"), str | bool | Mapping):
        listed = gpus if isinstance(gpus, list | tuple) else [] if gpus is None else [gpus]
        values["gpus"] = [str(item) if type(item) is int else item for item in listed]
    for key in ("name", "objectives", "space"):
        if values.get(key) in (None, "", {}, [], ()):
            raise BadInputError(f"the study has no {PATH}.{key}: choose one with sweeps=NAME, or give it")
    space = _space(values["space"])
    config = replace(build_settings(StudyConfig, {**values, "space": []}, path=PATH), space=space)
    listed = [*config.fixed, *(word for words in (*config.baselines, *config.repeats) for word in words)]
    if any(word.startswith(f"{DEVICES}=") for word in listed) or any(param.key == DEVICES for param in space):
        raise BadInputError(
            f"the study sets {DEVICES}: leave it out; {PATH}.gpus_per_trial=N gives each trial N GPUs, or N processes "
            "without GPUs"
        )
    drawn = {param.key for param in space if not param.when}  # one with `when` leaves a trial without it to `fixed`
    if overruled := next((word for word in config.fixed if key_of(word) in drawn), None):
        raise BadInputError(
            f"{PATH}.fixed has {overruled}, which {PATH}.space.{key_of(overruled)} overrules: leave one of the two out"
        )
    for name, direction in config.objectives.items():
        if name not in OBJECTIVES:
            raise unknown_name(name, what="objective", allowed=OBJECTIVES)
        if OBJECTIVES[name] not in (None, direction):
            raise BadInputError(f"{PATH}.objectives.{name}={direction} is not allowed: it must be {OBJECTIVES[name]}")
    ranged = next((param.key for param in space if not param.choices), None)
    if config.sampler == "grid" and ranged is not None:
        raise BadInputError(f"the grid sampler needs choices, and {PATH}.space.{ranged} is a range")
    return config


def key_of(word: str) -> str:
    """The setting that an override is about."""
    return word.lstrip("+~").partition("=")[0].partition("@")[0]


def _space(given: object) -> tuple[Param, ...]:
    if not isinstance(given, Mapping):
        raise BadInputError(f"{PATH}.space must be a group of keys, not {plain_text(given)}")
    params: dict[str, Param] = {}
    for key, spec in _dotted(given).items():
        param = _param(str(key), spec)
        for name in param.when:
            if name not in params:
                raise BadInputError(
                    f"{PATH}.space.{key}.when names {name}: allowed are settings of the space that stand before "
                    f"it ({', '.join(params) or 'there are none'})"
                )
            choices = params[name].choices
            if not set(map(str, choices or param.when[name])) & set(map(str, param.when[name])):
                raise BadInputError(
                    f"{PATH}.space.{key}.when.{name} is {list(param.when[name])}, of which none is ever drawn: "
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
        nested = isinstance(spec, Mapping) and spec and not set(DOMAIN_KEYS) & set(spec)
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


def _param(key: str, spec: Any) -> Param:
    path = f"{PATH}.space.{key}"
    if not isinstance(spec, Mapping) or not ("choices" in spec or {"low", "high"} <= set(spec)):
        raise BadInputError(f"{path} is {plain_text(spec)}: give choices, or low and high")
    if not all(key.split(".")):
        raise BadInputError(f"{path} names no setting: give one of a run, such as optim.lr")
    if "choices" in spec and {"low", "high"} & set(spec):
        raise BadInputError(f"{path} cannot have choices and a range: leave one of the two out")
    spec = {**spec, "when": {} if spec.get("when") is None else spec["when"]}
    if isinstance(spec["when"], Mapping):  # one value may stand for a list of it
        spec["when"] = {name: item if isinstance(item, list | tuple) else [item] for name, item in spec["when"].items()}
    values = build_settings(Domain, spec, path=path)
    param = Param(key=key, **{name: getattr(values, name) for name in DOMAIN_KEYS})
    try:
        for value in param.choices or (param.low, param.high):
            param.override(value)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise BadInputError(
            f"{path}.format={param.format!r} does not write its values ({error}): give one place for the value, such "
            "as state_{:.3g} for numbers or {} for any"
        ) from error
    return param


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


DOMAIN_KEYS = tuple(item.name for item in fields(Domain))
