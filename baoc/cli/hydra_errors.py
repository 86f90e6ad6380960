"""Translates Hydra's composition errors into messages that say what was given, what is allowed and what to do."""

import re
from collections.abc import Mapping
from traceback import walk_tb
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import GrammarParseError, InterpolationResolutionError, MissingMandatoryValue

from baoc.config.from_hydra import to_conf
from baoc.config.nodes import COLLECTIONS, UNREADABLE, as_typed
from baoc.config.options import GROUPS, group_keys, registry
from baoc.config.schema import RunConfig
from baoc.config.trainer_arguments import SET_BY_BAOC
from baoc.config.validate import unknown_key
from baoc.core.budgets import spellings
from baoc.core.catalogue import removal_message
from baoc.core.own_code import NAME_FORMATS
from baoc.errors import BadInputError, did_you_mean

_UNRESOLVED = (GrammarParseError, InterpolationResolutionError, MissingMandatoryValue)
_SWEEPER = "hydra.sweeper."
_MISCONFIGURED = "MisconfigurationException"  # Lightning's; importing it here would be slow
_NEEDS_MULTIRUN = re.compile(r"(?:Ambiguous value for argument|Sweep parameters) '(.*?)'(?:\n| requires)", re.DOTALL)


def translate_error(error: BaseException) -> BadInputError | None:
    """Returns a BadInputError for an error of Hydra, OmegaConf or Lightning's Trainer arguments; None for others."""
    if isinstance(error, ValueError) and "Config group override must be" in str(error):
        return BadInputError("a group cannot be null: choose one of its options, such as budget=unlimited")
    if isinstance(error, ValueError) and str(error).startswith("Only one of --run, --multirun"):
        return BadInputError(
            "of -m, -r, --cfg, --info and --shell-completion one can be given: leave the others out; what a sweep is "
            "made of is shown without -m: python run.py sweeps=NAME --cfg hydra -p hydra.sweeper"
        )
    if isinstance(error, ValueError) and "integer string conversion" in str(error):
        return BadInputError("a number of more than 4300 digits is given: no setting takes one, so write a smaller one")
    if isinstance(error, ValueError) and (key := _key_below_a_list(error)):
        return _unknown_key(key)
    if isinstance(error, _UNRESOLVED):
        return BadInputError(f"a value refers to what is not there: {str(error).splitlines()[0]}")
    if type(error).__name__ == _MISCONFIGURED:
        return BadInputError(f"Lightning refuses what `trainer` has: {error}")
    if not isinstance(error, HydraException):
        return None
    if isinstance(error, MissingConfigException):
        return _missing_option(error)
    if isinstance(error, OverrideParseException):
        override = getattr(error, "override", "")
        lines = str(error).split("\nSee http")[0].splitlines()
        reason = lines[-1]
        if reason.strip() == "^":  # below the character of the line before that is in the way
            at = reason.index("^") - len(lines[-2].removesuffix(override))
            if not lines[-2].endswith(override) or not 0 <= at < len(override):  # it has several lines
                found = UNREADABLE.search(override.replace("=", " ", 1))
                at = 0 if found is None else found.start()
            reason = f"{override[at]!r} needs quotes around the value"
        return BadInputError(
            f"cannot read {override!r}: {reason}\n"
            "write group=option or group.key=value; quote a value that holds , = or spaces, as in 'name=\"a,b\"'"
        )
    text = "\n".join(dict.fromkeys(line for line in (str(error).strip(), str(error.__cause__ or "").strip()) if line))
    return _override_error(text) or BadInputError(text)


def _key_below_a_list(error: ValueError) -> str | None:
    """The key of an override such as optim.betas.x=1, of which OmegaConf asks an index; None for other errors."""
    key = None
    for frame, _ in walk_tb(error.__traceback__):  # the last one decides
        is_index = frame.f_code.co_name == "update" and frame.f_globals["__name__"] == "omegaconf.omegaconf"
        key = frame.f_locals["key"] if is_index else None
    return key


def _missing_option(error: MissingConfigException) -> BadInputError:
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    if not group or error.options is None:
        return BadInputError(f"no configuration {error.missing_cfg_file!r}: {str(error).splitlines()[0]}")
    if group in ("allocator", "risk", "reallocation") and (removal := removal_message(option)):
        return BadInputError(removal)
    plugin = option.partition("_")[0] if group == "hydra/launcher" else ""
    if plugin in ("joblib", "submitit", "ray") and not any(name.startswith(plugin) for name in error.options):
        extra = "ray" if plugin == "ray" else "launchers"
        return BadInputError(
            f"hydra/launcher={option} needs hydra-{plugin}-launcher, which is not installed: "
            f"pip install 'baoc[{extra}]'"
        )
    singular = group.removesuffix("s") if group in COLLECTIONS else group
    options = [name for name in error.options if as_typed([f"{group}={name}"]) == [f"{group}={name}"]]  # no paths
    similar = did_you_mean(option, options)
    options += [NAME_FORMATS] if group in GROUPS else []
    allowed = spellings() if group == "budget" else ", ".join(options)
    return BadInputError(f"{group}={option}: there is no such {singular}{similar}\nallowed: {allowed}")


def _override_error(text: str) -> BadInputError | None:
    if match := _NEEDS_MULTIRUN.search(text):
        return BadInputError(f"{match.group(1)} names several values: add -m to make one run for each of them")
    if match := re.match(r"Could not append to config. An item is already at '(.*?)'", text):
        key = match.group(1)
        return BadInputError(f"{key} is there already: write {key}=VALUE, without a +")
    if match := re.match(r"Could not delete from config. '(.*?)'", text):
        return BadInputError(f"~{match.group(1)} removes what is not there")
    if match := re.match(r"Error merging override (.*?)=[\s\S]*DictConfig with ListConfig[\s\S]*=(\w+)$", text):
        key = match.group(1)
        if match.group(2) == "list":
            return BadInputError(f"{key} is a list, not a group of keys: give all of it, as in {key}=[A,B]")
        return BadInputError(f"{key} is a group of keys, not a list: set one, as in {key}.KEY=VALUE")
    if match := re.match(r"Error merging override [+~]*([^=\n]*)[\s\S]*(is not an int|index out of range)", text):
        return _unknown_key(match.group(1))
    if match := re.match(r"Error merging override (.*)\n(.*)", text):
        return BadInputError(f"{match.group(1)} is not allowed: {match.group(2)}")
    if match := re.match(r"Could not override '(.*?)'", text):
        key = match.group(1)
        if key.startswith(_SWEEPER):
            return _unknown_sweeper_setting(key.removeprefix(_SWEEPER))
        return None if key.startswith("hydra.") else _unknown_key(key)
    return None


def _unknown_sweeper_setting(leaf: str) -> BadInputError:
    """The error for a setting that studies do not have, or that only studies have."""
    node = ConfigStore.instance().load("hydra/sweeper/baoc.yaml").node
    allowed = ["name", "objectives", "space", *(str(key) for key in node if key != "_target_")]
    if leaf.split(".")[0] in ("space", "objectives", "early_stop"):
        return BadInputError(
            f"{_SWEEPER}{leaf} has no such key: ++{_SWEEPER}{leaf}=VALUE adds to what the study of -m sweeps=NAME has"
        )
    if leaf.split(".")[0] in allowed:
        return BadInputError(f"{_SWEEPER}{leaf} is a setting of a study: start one with -m sweeps=NAME")
    return unknown_key(leaf, allowed=allowed, path=_SWEEPER.removesuffix("."))


def _unknown_key(key: str) -> BadInputError:
    """The error for an unknown key, with the keys that its group has."""
    if key in COLLECTIONS:
        return BadInputError(f"there are no {key} yet: the folder {key}/ holds no yaml file")
    group, _, leaf = key.partition(".")
    if group == "trainer" and leaf in SET_BY_BAOC:
        return BadInputError(f"trainer.{leaf} is decided by BAOC: {SET_BY_BAOC[leaf]}")
    if group in GROUPS and leaf not in group_keys(group):
        return _unknown_option(group, leaf)
    if group == "recipe":  # a recipe's node has every key that the command line sets below it
        return BadInputError(f"unknown key below {key}: that is a value, not a group of keys as recipe.lr is")
    node: Any = {**to_conf(RunConfig()), **dict.fromkeys((*COLLECTIONS, "debug"))}
    path: list[str] = []
    for part in key.split("."):
        if not isinstance(node, Mapping):
            return BadInputError(f"unknown key {key}: {'.'.join(path)} is a value, not a group of keys")
        if part not in node:
            return unknown_key(part, allowed=node, path=".".join(path))
        node = node[part]
        path.append(part)
    return BadInputError(f"{key} cannot be set here: it is missing from this composition")


def _unknown_option(group: str, leaf: str) -> BadInputError:
    """The error for an option that no model, task or data set has, or that the chosen one lacks."""
    option, *deeper = leaf.split(".")
    if option in group_keys(group):
        default = to_conf(RunConfig())[group][option]
        if isinstance(default, Mapping):  # as in model.lora.rnk
            return unknown_key(".".join(deeper), allowed=default, path=f"{group}.{option}")
        return BadInputError(f"unknown key {group}.{leaf}: {group}.{option} is a value, not a group of keys")
    names = [name for name, entry in registry(group).items() if option in entry.options]
    if names:
        choices = "|".join(names)
        if group == "task":  # the model sets the task
            models = [model.name for model in registry("model").values() if model.task in names]
            choices += f" (model={'|'.join(models)})"
        return BadInputError(f"{group}.{option} is an option of {group}={choices} only: choose one, or drop it")
    options = dict.fromkeys(key for entry in registry(group).values() for key in entry.options)
    return unknown_key(leaf, allowed=[*group_keys(group), *options], path=group)
