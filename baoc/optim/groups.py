"""Turns what users pass (module, names, tensors, groups; spec names) into plain torch groups, blocks and specs.

Everything that cannot train correctly is refused here, before any state is allocated.
"""

import logging
import reprlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from baoc.core.catalogue import (
    CODECS,
    MAX_LR,
    MIN_EPS,
    SPECS,
    STORAGES,
    WEIGHTS,
    base_name,
    removal_message,
    unknown_spec_error,
)
from baoc.errors import BadInputError, unknown_name
from baoc.optim.rules import RULES, Rule
from baoc.optim.rules.matrix import SummingRule
from baoc.optim.shards import with_sharding
from baoc.optim.wrappers import refuse_shard, refuse_zero
from baoc.parallel import unwrapped
from baoc.planning.candidates import sums_columns, why_unsteppable
from baoc.types import Block, OptimizerSpec, ParamInfo, Placement, Role

log = logging.getLogger(__name__)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SETTINGS = ("lr", "betas", "eps", "weight_decay")
_ALLOWED = "pass a module, named or plain parameters, or parameter groups"


def to_plain(value: Any) -> Any:
    """Converts containers and numbers of other libraries (ListConfig, NumPy) to Python's own, for checkpoints."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [to_plain(item) for item in value] if type(value) is list else tuple(to_plain(item) for item in value)
    return value


def raw_groups(params: Any) -> list[Mapping[str, Any]]:
    """Parameters in any form that torch takes, as a list of groups. `members_of` reads their members."""
    refuse_zero()
    if isinstance(params, nn.Module):
        params = unwrapped(params).named_parameters()
    items: list[Any] = (
        [params] if isinstance(params, Tensor | Mapping) else _listed(params, what="the optimizer was given")
    )
    if not items or not isinstance(items[0], Mapping):
        return [{"params": items}]
    for index, group in enumerate(items):
        if not isinstance(group, Mapping) or "params" not in group:
            has = f"has the keys {', '.join(map(str, group))}" if isinstance(group, Mapping) else "is no dict"
            raise BadInputError(f"parameter group {index} {has}: give each group its parameters under 'params'")
    return items


def members_of(group: Mapping[str, Any], *, index: int) -> list[tuple[str | None, Any]]:
    """The (name, parameter) pairs of group number `index`. The name is None if none was given."""
    members, names = group["params"], group.get("param_names") or ()
    what = f"'params' of parameter group {index} is"
    if isinstance(members, nn.Module | Mapping):
        raise BadInputError(
            f"{what} a {type(members).__name__}: list its tensors, with module.parameters() or .named_parameters()"
        )
    members = [members] if isinstance(members, Tensor) else _listed(members, what=what)
    if len(names) not in (0, len(members)):
        raise BadInputError(f"parameter group {index} has {len(members)} parameters and {len(names)} param_names")
    pairs = []
    for position, member in enumerate(members):
        pair = member if isinstance(member, tuple) else (names[position] if names else None, member)
        if len(pair) != 2:
            raise BadInputError(f"{what} no list of tensors or (name, tensor) pairs: {_ALLOWED}")
        pairs.append(pair)
    return pairs


def _listed(values: Any, *, what: str) -> list[Any]:
    if not isinstance(values, Iterable):
        raise BadInputError(f"{what} a {type(values).__name__}: {_ALLOWED}")
    if isinstance(values, set | frozenset):  # keys and items of a dict are sets, too, but in order
        raise BadInputError(f"{what} a set, which has another order in each process: give a list, or named parameters")
    return list(values)


def to_groups(params: Any, *, existing: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """Parameters in any form as groups with "params" (tensors) and "param_names". Other keys stay as the user set them.

    Plain tensors are named param0, param1, ... in order. The number counts on from the `existing` groups, and skips
    taken names. A tensor that is listed twice counts once. Raises BadInputError if its two groups disagree, if a name
    repeats, or if there is no parameter.
    """
    settings_of: dict[Tensor, tuple[str, dict[str, Any]]] = {}  # parameter -> its name and its group's settings
    taken = {name for group in existing for name in group["param_names"]}
    first, groups = len(taken), []
    for index, raw in enumerate(raw_groups(params), start=len(existing)):
        settings = {key: to_plain(value) for key, value in raw.items() if key not in ("params", "param_names")}
        groups.append({**settings, "params": [], "param_names": []})
        for name, param in members_of(raw, index=index):
            if name is None and isinstance(param, Tensor) and param in settings_of:
                name = settings_of[param][0]
            number = first + len(settings_of)
            while name is None and f"param{number}" in taken:
                number += 1
            name = f"param{number}" if name is None else name
            taken.add(name)
            check_param(param, name=name)
            if param in settings_of:
                other_name, other_settings = settings_of[param]
                if settings != other_settings:
                    raise BadInputError(
                        f"{name} and {other_name} are one tied parameter in two groups with different settings "
                        f"({settings} and {other_settings}): list it in one group, or give both the same settings"
                    )
                if name != other_name:
                    log.info("%s is tied to %s: one state, one update", name, other_name)
                continue
            settings_of[param] = (name, settings)
            groups[-1]["params"].append(param)
            groups[-1]["param_names"].append(name)
    if not settings_of:
        raise BadInputError(f"the optimizer got no parameters: {_ALLOWED}")
    check_names(
        (index, name, param)
        for index, group in enumerate([*existing, *groups])
        for name, param in zip(group["param_names"], group["params"], strict=True)
    )
    return groups


def check_names(entries: Iterable[tuple[int, str, Tensor]]) -> None:
    """Raises BadInputError if two of the (group index, name, parameter) are two tensors of one name."""
    owners: dict[str, tuple[int, Tensor]] = {}
    for index, name, param in entries:
        first, owner = owners.setdefault(name, (index, param))
        if owner is not param:
            raise BadInputError(
                f"two parameters are called {name!r}: it occurs twice, in parameter groups {first} and {index}. States "
                "are kept by name, so give each its own"
            )


def is_placeholder_name(name: str) -> bool:
    """True for the names that unnamed parameters get."""
    return name.startswith("param") and name.removeprefix("param").isdecimal()


def check_tensor(param: Any, *, name: str) -> None:
    if not isinstance(param, Tensor):
        raise BadInputError(f"{name} is a {type(param).__name__}, not a tensor: {_ALLOWED}")
    refuse_shard(param, name=name)


def check_param(param: Any, *, name: str) -> None:
    """Raises BadInputError for what cannot be optimized here."""
    check_tensor(param, name=name)
    if is_lazy(param):
        raise BadInputError(
            f"{name} has no shape yet, as its layer is lazy: run one batch through the model before its optimizer is "
            "built"
        )
    if param.requires_grad and param.dtype not in FLOATS:
        raise BadInputError(
            f"{name} is {param.dtype}: parameters may be {', '.join(str(d).split('.')[1] for d in FLOATS)}. Keep a "
            "complex one as torch.view_as_real of it, or leave it out of this optimizer and step it by one of torch's"
        )
    if not param.is_leaf:
        raise BadInputError(f"{name} is not a leaf tensor: pass the parameter itself, not something computed from it")
    if any(stride == 0 and size > 1 for stride, size in zip(param.stride(), param.shape, strict=True)):
        raise BadInputError(
            f"{name} is expanded (strides {param.stride()} for shape {tuple(param.shape)}), so several of its elements "
            "are one number in memory: register the tensor before expanding it, or a .contiguous() copy"
        )


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises BadInputError for hyperparameters out of range, for switches of torch's AdamW that no rule has, and for
    misspelled hyperparameter names. Other keys are the user's own, as in torch: also a hyperparameter's name with other
    words around it, such as weight_decay_mult for a schedule."""
    for key in settings:
        similar = get_close_matches(str(key), _SETTINGS, n=1, cutoff=0.8)
        if similar and key not in _SETTINGS and f"_{similar[0]}_" not in f"_{key}_":
            raise BadInputError(f"a parameter group sets {key}, which nothing here reads: did you mean {similar[0]}?")
    for key in ("lr", "eps", "weight_decay"):
        value = settings[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= (MAX_LR if key == "lr" else sys.float_info.max):
            most = f" and at most {MAX_LR:g}" * (key == "lr")
            raise BadInputError(f"{key} is {reprlib.repr(value)}: give a finite number of at least 0{most}")
    if settings["eps"] < MIN_EPS:
        raise BadInputError(
            f"eps is {settings['eps']:g}, so weights whose gradient has always been 0 would become 0/0: give at least "
            f"{MIN_EPS:.3g}, such as 1e-8"
        )
    betas = settings["betas"]
    pair = isinstance(betas, Sequence) and len(betas) == 2
    if not pair or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
        raise BadInputError(f"betas are {betas!r}: give two numbers in [0, 1), such as (0.9, 0.999)")
    for key in ("amsgrad", "maximize", "differentiable"):
        if settings.get(key):
            raise BadInputError(f"a parameter group sets {key}=True, which no rule here has: leave it out")
    if settings.get("decoupled_weight_decay") is False and settings["weight_decay"]:
        raise BadInputError("a parameter group asks for coupled weight decay, rules here decay as AdamW: set it to 0")


def param_info(name: str, param: Tensor, *, group: int) -> ParamInfo:
    """The ParamInfo of a parameter from its name, shape and type alone."""
    dtype = str(param.dtype).removeprefix("torch.")
    info = ParamInfo(name=name, shape=tuple(param.shape), dtype=dtype, role=Role.OTHER, group=group)
    return with_sharding(info, param=param)


def single_block(info: ParamInfo) -> Block:
    """A parameter as a block of its own."""
    return Block(name=info.name, params=(info,), role=info.role, depth=info.depth)


def match_blocks(blocks: Iterable[Block], *, params: Mapping[str, Tensor]) -> dict[str, str]:
    """A parameter's name in its block -> its name in the groups, which may be an alias. `params`: the trainable ones.

    Raises BadInputError unless every trainable parameter is in exactly one block, with the shape it has there.
    """
    group_names: dict[str, str] = {}
    taken: set[str] = set()
    for block in blocks:
        for info in block.params:
            name = next((n for n in (info.name, *info.aliases) if n in params), None)
            if name is None:
                raise BadInputError(
                    f"block {block.name} has {info.name}, which the optimizer was not given (it has "
                    f"{shorten(params)}): pass a module or named parameters, described with the same names"
                )
            if name in taken:
                raise BadInputError(f"{name} is in two blocks, one of them {block.name}: each parameter has one block")
            if tuple(params[name].shape) != (block_shape := info.whole or info.shape):
                raise BadInputError(f"{name} has shape {tuple(params[name].shape)}, its block says {block_shape}")
            group_names[info.name] = name
            taken.add(name)
    missing = [name for name in params if name not in taken]
    if missing:
        raise BadInputError(f"no block has {shorten(missing)}: every trainable parameter needs one")
    return group_names


def shorten(names: Iterable[str]) -> str:
    """The first four of the names, and how many more there are."""
    names = list(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def resolve_spec(spec: str | OptimizerSpec) -> OptimizerSpec:
    """A spec of the catalogue by name, or a spec of the user's own, checked."""
    if isinstance(spec, str):
        if spec not in SPECS:
            raise unknown_spec_error(spec)
        spec = SPECS[spec]
    base = spec.rule if spec.storage == "fp32" else f"{spec.rule}_{spec.storage}"
    for name, what, allowed in (
        (spec.rule, "update rule", RULES),
        (spec.storage, "storage", STORAGES),
        (spec.weights, "kind of weights", WEIGHTS),
    ):
        if name not in allowed:
            message = removal_message(spec.name) or removal_message(f"{base}+{spec.weights}")
            raise BadInputError(message) if message else unknown_name(name, what=what, allowed=allowed)
    assert {STORAGES[spec.storage].m, STORAGES[spec.storage].v} <= set(CODECS)
    if spec.placement not in tuple(Placement):
        raise unknown_name(spec.placement, what="placement", allowed=Placement)
    return spec


def check_applies(spec: OptimizerSpec, *, block: Block) -> None:
    """Raises BadInputError if the spec cannot run on a parameter of the block."""
    rule = RULES[spec.rule]
    if why := why_unsteppable(block, spec=spec, rule=rule.info) or _unsummed(block, rule=rule):
        native = base_name(spec.name) if spec.weights != "native" else "adamw"
        raise BadInputError(
            f"block {block.name} cannot run {spec.name}: {why}. Give block {block.name} another spec, such as {native}"
        )


def _unsummed(block: Block, *, rule: Rule) -> str:
    """Why a rule that does not sum over ranks cannot step the block, as a clause for a message; empty if it can."""
    sharded = next((param.name for param in block.params if param.whole is not None), None)
    if sharded is None or not sums_columns(rule.info) or isinstance(rule, SummingRule):
        return ""
    return (
        f"fully_shard cuts {sharded}, and {type(rule).__name__} takes sums over its columns without asking other ranks "
        "for theirs: derive it from baoc.optim.rules.matrix.SummingRule"
    )


def specs_by_block(specs: Any, *, blocks: Sequence[Block]) -> dict[str, OptimizerSpec]:
    """Block -> spec, in block order. `specs`: one for all, or a mapping that names every block."""
    if isinstance(specs, str | OptimizerSpec):
        chosen = {block.name: resolve_spec(specs) for block in blocks}
    elif not isinstance(specs, Mapping):
        raise BadInputError(f"specs is {specs!r}: give the name of one for all blocks, or a dict of block name to spec")
    else:
        names = [block.name for block in blocks]
        unknown = [name for name in specs if name not in set(names)]
        if unknown:
            raise unknown_name(unknown[0], what="block", allowed=names)
        missing = [name for name in names if name not in specs]
        if missing:
            raise BadInputError(f"no spec was given for block(s) {shorten(missing)}: name one for every block")
        chosen = {name: resolve_spec(specs[name]) for name in names}
    for block in blocks:
        check_applies(chosen[block.name], block=block)
    return chosen


def named_params(param_groups: list[dict[str, Any]]) -> dict[str, tuple[Tensor, int]]:
    """Name -> parameter and index of its group, frozen ones included."""
    return {
        name: (param, index)
        for index, group in enumerate(param_groups)
        for name, param in zip(group["param_names"], group["params"], strict=True)
    }


def with_current_dtypes(block: Block, params: Mapping[str, Tensor]) -> Block:
    """The block with its parameters' present types and shards: they may have been cast or sharded since."""
    present = [(info, params[info.name]) for info in block.params]
    infos = tuple(
        with_sharding(replace(info, dtype=str(param.dtype).removeprefix("torch.")), param=param)
        for info, param in present
    )
    return block if infos == block.params else replace(block, params=infos)
