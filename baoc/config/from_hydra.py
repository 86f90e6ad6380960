"""The one door from a composed configuration to a RunConfig, and back to plain values for `config.yaml`."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from baoc.budgets import parse_budget
from baoc.config.nodes import budget_node
from baoc.config.schema import MODEL_OPTIONS, ModelConfig, RunConfig
from baoc.config.strict import build, did_you_mean, require, unknown_key
from baoc.config.trainer_arguments import TRAINER_OWNED
from baoc.errors import BadInputError
from baoc.types import Budget, Role, to_plain


def from_hydra(config: DictConfig) -> RunConfig:
    """A composed configuration -> RunConfig. Raises BadInputError that names the key, on anything the schema refuses."""
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise BadInputError(f"a value refers to what is not there: {str(error).splitlines()[0]}") from error
    run = from_plain(cast(Mapping[str, Any], plain), complete=True)
    check_names(run)
    return run


def from_plain(plain: Mapping[str, Any], *, complete: bool = False) -> RunConfig:
    """Plain mappings in the shape of conf/ -> RunConfig; what is absent takes its default unless `complete`."""
    given = {key: value for key, value in plain.items() if key not in ("experiments", "sweeps", "debug")}
    if "trainer" in given:
        _refuse_owned(given["trainer"])
    if "model" in given:
        given["model"] = _with_options(given["model"], complete=complete)
    if "budget" in given:
        given["budget"] = _budget_fields(given["budget"])
    return build(RunConfig, given, complete=complete)


def to_conf(config: RunConfig) -> dict[str, Any]:
    """A RunConfig as plain values in the shape of conf/; `from_plain` reads it back."""
    plain = to_plain(config)
    plain["model"] = {key: value for key, value in plain["model"].items() if key != "options"}
    plain["model"].update(to_plain(config.model.options))
    plain["budget"] = budget_node(config.budget)
    return plain


def write_config(config: RunConfig, *, path: Path) -> None:
    """`config.yaml`: every value, interpolations resolved."""
    text = yaml.safe_dump(to_conf(config), sort_keys=False, default_flow_style=None, allow_unicode=True)
    path.write_text(text, encoding="utf-8")


def read_config(path: Path) -> RunConfig:
    """What `write_config` wrote, by this version or an older one. Raises BadInputError."""
    try:
        plain = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadInputError(f"cannot read {path}: {error}") from error
    if not isinstance(plain, dict):
        raise BadInputError(f"{path} holds no configuration: it must be the config.yaml of a run folder")
    return from_plain(plain)


def check_names(config: RunConfig) -> None:
    """BadInputError for an allocator, risk, risk term, spec or role that there is not, and for a path that is not."""
    from baoc.allocation import ALLOCATORS
    from baoc.catalogue import select
    from baoc.risk import RISKS

    _known(config.allocator.name, ALLOCATORS, key="allocator")
    _known(config.risk.name, RISKS, key="risk")
    select(config.catalogue.specs)
    for role in config.catalogue.keep_fp32_roles:
        _known(role, [role.value for role in Role], key="catalogue.keep_fp32_roles")
    if config.resume not in (None, "auto"):
        require(Path(config.resume).exists(), "resume", config.resume, "auto, or a run folder or checkpoint that exists")


def _known(name: str, allowed: Any, *, key: str) -> None:
    if name not in allowed:
        raise BadInputError(f"{key}={name} is not known{did_you_mean(name, allowed)}\nallowed: {', '.join(allowed)}")


def _refuse_owned(trainer: object) -> None:
    for key in trainer if isinstance(trainer, Mapping) else ():
        if key in TRAINER_OWNED:
            raise BadInputError(f"trainer.{key} is decided by BAOC: {TRAINER_OWNED[key]}")


def _with_options(model: object, *, complete: bool) -> dict[str, Any]:
    """`dropout` and other options of the model's own move from beside `size` into `options`."""
    if not isinstance(model, Mapping):
        raise BadInputError("model must be a group of keys: choose it with model=vit, its size with model.size=tiny")
    own = {item.name for item in fields(ModelConfig)} - {"options"}
    schema = MODEL_OPTIONS.get(model.get("name", ModelConfig().name))
    if schema is None:
        raise BadInputError(f"model.name={model.get('name')} is not known\nallowed: {', '.join(MODEL_OPTIONS)}")
    known = [item.name for item in fields(schema)]
    options = {str(key): value for key, value in model.items() if key not in own}
    for key in options:
        if key not in known:
            raise unknown_key(key, allowed=sorted(own) + known, path="model")
    built = build(schema, options, path="model", complete=complete)
    return {**{key: value for key, value in model.items() if key in own}, "options": asdict(cast(Any, built))}


def _budget_fields(given: object) -> dict[str, Any]:
    if not isinstance(given, str | int | float | Mapping):
        raise BadInputError("a run needs a budget: budget=unlimited is the one without limits")
    budget = parse_budget(given)
    return {item.name: getattr(budget, item.name) for item in fields(Budget)}
