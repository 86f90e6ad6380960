"""What a study is: objectives, the space that is searched, its baselines, and how many trials at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from baoc.errors import BadInputError, unknown_name

OBJECTIVES = {"quality": None, "peak_bytes": "minimize", "state_bytes": "minimize", "samples_per_s": "maximize"}
SAMPLERS = ("tpe", "nsgaii", "gp", "random", "grid")
_KEYS = ("choices", "low", "high", "log", "step", "format")


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One setting that is searched: choices, or a range of numbers. `format` turns a value into the override's."""

    key: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None
    format: str = "{}"

    def override(self, value: Any) -> str:
        return f"{self.key}={self.format.format(value)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyConfig:
    """`sweeps/NAME.yaml`. `objectives` maps a result's field to minimize or maximize. `n_trials` is the total.

    `fixed` are overrides of every trial, `baselines` lists of overrides that are tried first. `retries`: how often a
    trial that was killed, or failed through a bug, is begun again.
    """

    name: str
    objectives: Mapping[str, str]
    space: tuple[Param, ...]
    fixed: tuple[str, ...] = ()
    baselines: tuple[tuple[str, ...], ...] = ()
    sampler: str = "tpe"
    seed: int = 0
    n_trials: int = 20
    workers: int = 1
    threads: int = 1  # of torch, per trial
    retries: int = 1
    storage: str | None = None

    def definition(self) -> dict[str, Any]:
        """What makes trials comparable: a study goes on only with the same."""
        return {
            "objectives": dict(self.objectives),
            "space": {p.key: {k: _plain(getattr(p, k)) for k in _KEYS} for p in self.space},
            "fixed": list(self.fixed),
        }


def read_study(given: Any) -> StudyConfig:
    """Plain values (hydra.sweeper) -> StudyConfig. Raises BadInputError that names the key."""
    values = {key: value for key, value in dict(given).items() if key != "_target_"}
    known = [item.name for item in fields(StudyConfig)]
    for key in values:
        if key not in known:
            raise unknown_name(key, what="setting of a study (hydra.sweeper)", allowed=known)
    for key in ("name", "objectives", "space"):
        if not values.get(key):
            raise BadInputError(f"the study has no hydra.sweeper.{key}: choose one with sweeps=NAME, or give it")
    objectives = {str(name): str(way) for name, way in dict(values["objectives"]).items()}
    for name, way in objectives.items():
        if name not in OBJECTIVES:
            raise unknown_name(name, what="objective", allowed=OBJECTIVES)
        if way not in ("minimize", "maximize") or OBJECTIVES[name] not in (None, way):
            raise BadInputError(f"objective {name} is {way!r}: allowed is {OBJECTIVES[name] or 'minimize or maximize'}")
    sampler = values.get("sampler", "tpe")
    if sampler not in SAMPLERS:
        raise unknown_name(str(sampler), what="sampler", allowed=SAMPLERS)
    for key, least in (("n_trials", 1), ("workers", 1), ("threads", 1), ("retries", 0)):
        if not isinstance(values.get(key, 1), int) or values.get(key, 1) < least:
            raise BadInputError(f"hydra.sweeper.{key}={values[key]}: give a whole number of at least {least}")
    values["objectives"] = objectives
    values["space"] = tuple(_param(str(key), spec, sampler=sampler) for key, spec in dict(values["space"]).items())
    values["fixed"] = tuple(map(str, values.get("fixed", ())))
    values["baselines"] = tuple(tuple(map(str, baseline)) for baseline in values.get("baselines", ()))
    return StudyConfig(**values)


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
    return Param(key=key, **{**spec, **({"choices": tuple(spec["choices"])} if "choices" in spec else {})})


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
