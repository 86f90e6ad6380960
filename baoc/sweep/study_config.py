"""What a study is: its objectives, the space it searches, its baselines, and how many trials run at once."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Annotated, Any, Literal

from baoc.config.validate import ABOVE_0, FROM_0, Allowed, at_least, build_settings, plain_text, refuse_unwritable
from baoc.errors import BadInputError, unknown_name

OBJECTIVES = {"quality": None, "peak_bytes": "minimize", "state_bytes": "minimize", "samples_per_s": "maximize"}
PATH = "hydra.sweeper"  # where the command line has a study's settings
DEVICES = "trainer.devices"  # of a trial, which `gpus_per_trial` sets
MOST_WORKERS = 1024
_NULL_IS_DEFAULT = ("fixed", "baselines", "repeats", "early_stop")  # null clears what the file sets
# Attributes of a trial in the storage; their names are those of stored studies.
OWNER_KEY = "worker"  # name of the worker that runs the trial
OVERRIDES_KEY = "words"  # all overrides of its run
BASELINE_KEY = "overrides"  # overrides of a baseline; a sampled trial has no such attribute
MESSAGE_KEY = "text"  # why a trial failed, was pruned or violated a constraint
SECONDS_KEY = "seconds"  # that an ended trial took, by the clock of its worker that is never set
ATTEMPTS_KEY = "attempts"  # how often its run was killed or failed through a bug


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """What a searched setting may be: one of `choices`, or a number from `low` to `high`. `format` turns a value into
    the text of an override. `when` maps earlier settings of the space to the values with which this one is active."""

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
        if step is not None and (step > high - low or (self.is_integer and step != int(step))):
            fitting = "a whole number of" if self.is_integer else "a number of"
            raise ValueError(f"has step={step}: give {fitting} at most high - low = {high - low}")

    @property
    def is_integer(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Param(Domain):
    key: str

    def definition(self) -> dict[str, Any]:
        """The domain in plain values, as a study's storage has it."""
        return {name: _plain(getattr(self, name)) for name in DOMAIN_KEYS if name != "when" or self.when}

    def override(self, value: Any) -> str:
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
        if not self.low <= value <= self.high or (self.is_integer and value != int(value)):
            return None
        return int(value) if self.is_integer else value

    def is_active(self, chosen: Mapping[str, Any]) -> bool:
        """Whether the setting is searched, given the `chosen` values of earlier settings."""
        return all(key in chosen and chosen[key] in values for key, values in self.when.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStop:
    """When a trial is pruned: at a rung where another trial is better in every objective.

    `rungs` are optimizer steps at which the run validates and logs `metric`, its quality. Measured objectives must be
    better by the share `margin` of the trial's own value. `least` is the number of other trials that must have passed
    the rung before one is pruned there."""

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

    `objectives` maps a field of result.json to minimize or maximize. `fixed` are overrides of every trial; `baselines`
    are lists of overrides that are tried first. With `repeats`, a trial runs once with each of these lists of
    overrides; its quality and throughput are means over these runs, its bytes their maximum. `n_trials` is the total
    over all starts of the command.

    `retries` is how often a run that was killed, failed through a bug or hung is started again. A run hangs if it has
    written neither a metric nor a line for `stall_s` seconds; 0 disables this. `storage`: null is sqlite in the study's
    folder, `journal` a journal file there, else a database URL. `gpus`: `auto` or indices. `per_gpu` trials share a GPU
    if their memory budgets fit it together. A trial trains on `gpus_per_trial` GPUs with one rank each; on a machine
    without GPUs it has as many ranks.
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
        definition: dict[str, Any] = {
            "objectives": dict(self.objectives),
            "space": {param.key: param.definition() for param in self.space},
            "fixed": list(self.fixed),
        }
        if self.repeats:  # absent from older studies, which resume without it
            definition["repeats"] = [list(overrides) for overrides in self.repeats]
        return definition


def read_study(settings: Mapping[str, Any]) -> StudyConfig:
    """A StudyConfig from the plain values of hydra.sweeper. Raises BadInputError that names the key."""
    refuse_unwritable(settings, key=PATH)
    values = {
        key: value
        for key, value in settings.items()
        if key != "_target_" and not (value is None and key in _NULL_IS_DEFAULT)
    }
    if not isinstance(gpus := values.get("gpus", "auto"), str | bool | Mapping):
        indices = gpus if isinstance(gpus, list | tuple) else [] if gpus is None else [gpus]
        values["gpus"] = [str(index) if type(index) is int else index for index in indices]
    for key in ("name", "objectives", "space"):
        if values.get(key) in (None, "", {}, [], ()):
            raise BadInputError(f"the study has no {PATH}.{key}: choose one with sweeps=NAME, or give it")
    space = _space(values["space"])
    config = replace(build_settings(StudyConfig, {**values, "space": []}, path=PATH), space=space)
    overrides = chain(config.fixed, *config.baselines, *config.repeats)
    if any(word.startswith(f"{DEVICES}=") for word in overrides) or any(param.key == DEVICES for param in space):
        raise BadInputError(
            f"the study sets {DEVICES}: leave it out; {PATH}.gpus_per_trial=N gives each trial N GPUs, or N processes "
            "without GPUs"
        )
    always_sampled = {param.key for param in space if not param.when}  # an inactive setting leaves `fixed` its effect
    if overruled := next((override for override in config.fixed if key_of(override) in always_sampled), None):
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


def key_of(override: str) -> str:
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def _space(settings: object) -> tuple[Param, ...]:
    if not isinstance(settings, Mapping):
        raise BadInputError(f"{PATH}.space must be a group of keys, not {plain_text(settings)}")
    params: dict[str, Param] = {}
    for key, domain in _dotted(settings).items():
        param = _param(str(key), domain)
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


def _dotted(settings: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> its choices or range. A file writes keys with dots; a command line can only nest them
    (++hydra.sweeper.space.optim.lr.low=0.001). Domains of one key are merged, the later one's values win, and choices
    replace a range or the other way round."""
    domains: dict[str, Any] = {}
    for key, value in settings.items():
        is_nested = isinstance(value, Mapping) and value and not set(DOMAIN_KEYS) & set(value)
        if is_nested and all(isinstance(item, Mapping) for item in value.values()):
            new = _dotted(value, prefix=f"{prefix}{key}.")
        else:
            new = {f"{prefix}{key}": value}
        for name, domain in new.items():
            old = domains.get(name)
            domains[name] = _merge_domains(old, domain) if isinstance(old, Mapping) else domain
    return domains


def _merge_domains(old: Mapping[str, Any], new: Any) -> Any:
    if not isinstance(new, Mapping):
        return new
    same_kind = ("choices" in new) == ("choices" in old) or not {"choices", "low", "high"} & set(new)
    return {key: value for key, value in old.items() if same_kind or key in ("when", "format")} | dict(new)


def _param(key: str, domain: Any) -> Param:
    path = f"{PATH}.space.{key}"
    if not isinstance(domain, Mapping) or not ("choices" in domain or {"low", "high"} <= set(domain)):
        raise BadInputError(f"{path} is {plain_text(domain)}: give choices, or low and high")
    if not all(key.split(".")):
        raise BadInputError(f"{path} names no setting: give one of a run, such as optim.lr")
    if "choices" in domain and {"low", "high"} & set(domain):
        raise BadInputError(f"{path} cannot have choices and a range: leave one of the two out")
    when = {} if domain.get("when") is None else domain["when"]
    if isinstance(when, Mapping):
        when = {name: values if isinstance(values, list | tuple) else [values] for name, values in when.items()}
    checked = build_settings(Domain, {**domain, "when": when}, path=path)
    param = Param(key=key, **{name: getattr(checked, name) for name in DOMAIN_KEYS})
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
