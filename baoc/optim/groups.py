"""From what a user passes (module, names, tensors, groups; spec names) to plain torch groups, blocks and specs.

Everything that cannot train correctly is refused here, before any state is allocated.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from baoc.catalogue import CODECS, SPECS, STORAGES
from baoc.errors import BadInputError, unknown_name
from baoc.rules import RULES
from baoc.types import Block, OptimizerSpec, ParamInfo, Role

log = logging.getLogger(__name__)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ALLOWED = "pass a module, named or plain parameters, or parameter groups"


def plain(value: Any) -> Any:
    """Containers of any library (such as ListConfig) as tuples and dicts, so that groups survive a checkpoint."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value] if type(value) is list else tuple(plain(item) for item in value)
    return value


def to_groups(params: Any, *, first: int = 0) -> list[dict[str, Any]]:
    """Any spelling of parameters -> groups with "params" (tensors) and "param_names"; other keys as the user set them.

    Plain tensors are called param0, param1, ... in order, counted from `first`. A tensor listed twice counts once.
    Raises BadInputError where its two groups disagree, where a name repeats, or where nothing was given.
    """
    if isinstance(params, nn.Module):
        params = params.named_parameters()
    items: list[Any] = [params] if isinstance(params, Tensor | Mapping) else list(params)
    raw = items if items and isinstance(items[0], Mapping) else [{"params": items}]
    seen: dict[Tensor, tuple[str, dict[str, Any]]] = {}
    groups = [_group(group, seen=seen, first=first) for group in raw]
    if not seen:
        raise BadInputError(f"the optimizer got no parameters: {_ALLOWED}")
    names = [name for group in groups for name in group["param_names"]]
    repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if repeated:
        raise BadInputError(f"two parameters are called {repeated[0]!r}: states are kept by name, so give each its own")
    return groups


def _group(raw: Mapping[str, Any], *, seen: dict[Tensor, tuple[str, dict[str, Any]]], first: int) -> dict[str, Any]:
    """One group in plain types; `seen` maps the parameters of this and the groups before to name and settings."""
    members = raw["params"]
    members = [members] if isinstance(members, Tensor) else list(members)
    given_names = raw.get("param_names", ())
    settings = {key: plain(value) for key, value in raw.items() if key not in ("params", "param_names")}
    params, names = [], []
    for index, member in enumerate(members):
        if isinstance(member, tuple):
            name, param = member
        else:
            name, param = (given_names[index] if len(given_names) else f"param{first + len(seen)}"), member
        check_param(param, name=name)
        if param in seen:
            _check_duplicate(name, owner=seen[param], settings=settings)
            continue
        seen[param] = (name, settings)
        params.append(param)
        names.append(name)
    return {**settings, "params": params, "param_names": names}


def _check_duplicate(name: str, *, owner: tuple[str, dict[str, Any]], settings: dict[str, Any]) -> None:
    first, other = owner
    if settings != other:
        raise BadInputError(
            f"{name} and {first} are one tied parameter in two groups with different settings ({settings} and "
            f"{other}): list it in one group, or give both the same settings"
        )
    if name != first:
        log.info("%s is tied to %s: one state, one update", name, first)


def check_param(param: Any, *, name: str) -> None:
    """Raises BadInputError for what cannot be optimized here."""
    if not isinstance(param, Tensor):
        raise BadInputError(f"{name} is a {type(param).__name__}, not a tensor: {_ALLOWED}")
    if param.requires_grad and param.dtype not in FLOATS:
        raise BadInputError(
            f"{name} is {param.dtype}: parameters may be {', '.join(str(d).split('.')[1] for d in FLOATS)}"
        )
    if not param.is_leaf:
        raise BadInputError(f"{name} is not a leaf tensor: pass the parameter itself, not something computed from it")
    if any(stride == 0 and size > 1 for stride, size in zip(param.stride(), param.shape, strict=True)):
        raise BadInputError(
            f"{name} is expanded (strides {param.stride()} for shape {tuple(param.shape)}), so several of its elements "
            "are one number in memory: register the tensor before expanding it, or a .contiguous() copy"
        )


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises BadInputError for hyperparameters out of range, and for switches of torch's AdamW that no rule has."""
    for key, least in (("lr", 0.0), ("eps", 0.0), ("weight_decay", 0.0)):
        value = settings[key]
        if not isinstance(value, int | float) or not value >= least:
            raise BadInputError(f"{key} is {value!r}: give a number of at least {least:g}")
    betas = settings["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise BadInputError(f"betas are {betas}: give two numbers in [0, 1), such as (0.9, 0.999)")
    for key in ("amsgrad", "maximize", "differentiable"):
        if settings.get(key):
            raise BadInputError(f"a parameter group sets {key}=True, which no rule here has: leave it out")
    if settings.get("decoupled_weight_decay") is False and settings["weight_decay"]:
        raise BadInputError("a parameter group asks for coupled weight decay, rules here decay as AdamW: set it to 0")


def param_info(name: str, param: Tensor, *, group: int) -> ParamInfo:
    """What is known of a parameter that no one described."""
    dtype = str(param.dtype).removeprefix("torch.")
    return ParamInfo(name=name, shape=tuple(param.shape), dtype=dtype, role=Role.OTHER, group=group)


def single_block(info: ParamInfo) -> Block:
    """A parameter as a block of its own."""
    return Block(name=info.name, params=(info,), role=info.role, depth=info.depth)


def match_blocks(blocks: Iterable[Block], *, params: Mapping[str, Tensor]) -> dict[str, str]:
    """Owner name in the blocks -> name in the groups; aliases are followed. `params` are the trainable ones.

    Raises BadInputError unless every trainable parameter is in exactly one block, with the shape it has there.
    """
    found: dict[str, str] = {}
    for block in blocks:
        for info in block.params:
            name = next((n for n in (info.name, *info.aliases) if n in params), None)
            if name is None:
                raise BadInputError(
                    f"block {block.name} has {info.name}, which the optimizer was not given (it has {_some(params)}): "
                    "pass a module or named parameters, described with the same names"
                )
            if name in found.values():
                raise BadInputError(f"{name} is in two blocks, one of them {block.name}: each parameter has one block")
            if tuple(params[name].shape) != info.shape:
                raise BadInputError(f"{name} has shape {tuple(params[name].shape)}, its block says {info.shape}")
            found[info.name] = name
    left = [name for name in params if name not in set(found.values())]
    if left:
        raise BadInputError(f"no block has {_some(left)}: every trainable parameter needs one")
    return found


def _some(names: Iterable[str], *, most: int = 4) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def to_spec(spec: str | OptimizerSpec) -> OptimizerSpec:
    """A row by name, or a row of the user's own, checked."""
    if isinstance(spec, str):
        if spec not in SPECS:
            raise unknown_name(spec, what="optimizer spec", allowed=SPECS)
        spec = SPECS[spec]
    if spec.rule not in RULES:
        raise unknown_name(spec.rule, what="update rule", allowed=RULES)
    if spec.storage not in STORAGES:
        raise unknown_name(spec.storage, what="storage", allowed=STORAGES)
    assert {STORAGES[spec.storage].m, STORAGES[spec.storage].v} <= set(CODECS)
    if spec.weights != "native" or spec.placement != "device":
        raise BadInputError(
            f"spec {spec.name} asks for weights={spec.weights}, placement={spec.placement}: this version has "
            "weights=native and placement=device"
        )
    return spec


def check_applies(spec: OptimizerSpec, *, block: Block) -> None:
    """Raises BadInputError where the rule cannot run on a parameter of the block."""
    info = RULES[spec.rule].info
    for param in block.params:
        if info.needs_matrix and param.matrix_shape is None:
            raise BadInputError(
                f"block {block.name} cannot run {spec.name}: {param.name} of shape {param.shape} is no matrix. Give "
                "the block another spec, such as adamw or sign"
            )
    if info.hidden_only and block.role in (Role.EMBEDDING, Role.HEAD):
        raise BadInputError(f"block {block.name} cannot run {spec.name}: it is for hidden layers, not the {block.role}")


def specs_by_block(specs: Any, *, blocks: Sequence[Block]) -> dict[str, OptimizerSpec]:
    """One spec for all, or a mapping that names every block -> spec per block, in block order."""
    if isinstance(specs, str | OptimizerSpec):
        chosen = {block.name: to_spec(specs) for block in blocks}
    else:
        names = [block.name for block in blocks]
        unknown = [name for name in specs if name not in set(names)]
        if unknown:
            raise unknown_name(unknown[0], what="block", allowed=names)
        missing = [name for name in names if name not in specs]
        if missing:
            raise BadInputError(f"no spec was given for block(s) {_some(missing)}: name one for every block")
        chosen = {name: to_spec(specs[name]) for name in names}
    for block in blocks:
        check_applies(chosen[block.name], block=block)
    return chosen
