"""Describes the parameters of a module, of named tensors or of parameter groups as ParamInfo, which planning reads.

Only names, shapes and module types are read, so a model on the meta device is described without allocating memory.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from baoc.core.blocks import role_of
from baoc.errors import BadInputError
from baoc.optim.shards import with_sharding
from baoc.parallel import unwrapped
from baoc.types import ParamInfo, Role

# Inside these modules, a list holds heads, experts or sublayers of one layer, not layers.
_ONE_LAYER_TYPE = re.compile(r"attention|mlp$|feedforward|moe|experts", re.IGNORECASE)
_ONE_LAYER_NAME = re.compile(r"(self_?|cross_?)?att(ention|n)|mlp|ffn?|feed_?forward|.*moe|experts", re.IGNORECASE)
# Layers that take a condition or choose among experts, wherever they are registered.
_NO_HEAD = re.compile(r"(.+_)?(router|gate|gating|time|cond|teacher)(_|$)", re.IGNORECASE)
# Modules whose weights are stored (in, out): GPT-2's Conv1D, and transposed convolutions as (in, out * kernel).
_TRANSPOSED_TYPE = re.compile(r"Conv1D|ConvTranspose\dd")


@dataclass(slots=True)
class _Owner:
    """A tensor with its first name and its other ones, if it is tied."""

    tensor: Tensor
    name: str
    aliases: list[str] = field(default_factory=list)


def describe(
    source: Any, *, optimizer_groups: Sequence[Mapping[str, Any]] | None = None, part_of: nn.Module | None = None
) -> tuple[ParamInfo, ...]:
    """The trainable parameters of `source` in order. A tied parameter appears once, with its other names as aliases.

    Roles and depth come from module types and names; without a module, from names and shapes as far as possible. The
    last linear layer is the head whatever it is called, see `_unnamed_heads`, unless that is in doubt.

    Args:
        source: a module; a mapping or pairs (name, tensor); plain tensors (named param0, param1, ... by position); or a
            sequence of parameter groups (dicts with "params" of any of these).
        optimizer_groups: torch's `param_groups`. Each parameter gets the index of its group; others are left out.
        part_of: the network of which `source` may be hidden layers alone; its last layer is the head.

    Raises:
        BadInputError: a parameter is in two groups, or in the optimizer but not in `source`; two tensors have one name;
            a lazy module's parameter has no shape yet.
    """
    source = unwrapped(source)
    owners = _owners(source)
    groups = source if optimizer_groups is None and _is_groups(source) else optimizer_groups
    group_of = _group_of(groups, owners=owners) if groups is not None else None
    module = source if isinstance(source, nn.Module) else None
    types = _module_types(module) if module is not None else {}
    layers = _Layers(module)
    depths = {key: layers.depth(owner.name) for key, owner in owners.items()}  # frozen layers keep their numbers
    roles = {
        key: role_of(owner.name, shape=owner.tensor.shape, module_type=types.get(owner.name, ""))
        for key, owner in owners.items()
        if not isinstance(owner.tensor, UninitializedParameter)
    }
    roles |= {key: Role.HEAD for key in _unnamed_heads(source if part_of is None else part_of) if key in roles}
    infos: list[ParamInfo] = []
    for key, owner in owners.items():
        if not owner.tensor.requires_grad or (group_of is not None and key not in group_of):
            continue
        if isinstance(owner.tensor, UninitializedParameter):
            raise BadInputError(
                f"parameter {owner.name!r} has no shape yet, as its layer is lazy: run one batch through the module "
                "first"
            )
        shape = tuple(owner.tensor.shape)
        kind = types.get(owner.name, "")
        info = ParamInfo(
            name=owner.name,
            shape=shape,
            dtype=str(owner.tensor.dtype).removeprefix("torch."),
            role=roles[key],
            depth=depths[key],
            group=group_of[key] if group_of is not None else 0,
            aliases=tuple(owner.aliases),
            transposed=len(shape) > 1 and _TRANSPOSED_TYPE.fullmatch(kind) is not None,
        )
        infos.append(with_sharding(info, param=owner.tensor))
    return tuple(infos)


# -- names ------------------------------------------------------------------------------------------------------------


def _is_groups(source: Any) -> bool:
    return isinstance(source, Sequence) and len(source) > 0 and all(isinstance(group, Mapping) for group in source)


def _owners(source: Any) -> dict[int, _Owner]:
    """id of a tensor -> its first name and its aliases, in order of appearance."""
    owners: dict[int, _Owner] = {}
    taken: dict[str, int] = {}
    for name, tensor in _named(source):
        if taken.setdefault(name, id(tensor)) != id(tensor):
            raise BadInputError(f"two parameters are called {name!r}: give every parameter a name of its own")
        owner = owners.setdefault(id(tensor), _Owner(tensor, name))
        if name != owner.name and name not in owner.aliases:
            owner.aliases.append(name)
    return owners


def _named(source: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(source, nn.Module):
        yield from source.named_parameters(remove_duplicate=False)
    elif isinstance(source, Mapping):
        yield from source.items()
    elif _is_groups(source):
        yield from _named([entry for group in source for entry in _entries(group)])
    else:
        names: dict[int, str] = {}  # by id: a tensor that is listed twice keeps one name, as a duplicate and no alias
        for position, entry in enumerate(source):
            if isinstance(entry, Tensor):
                yield names.setdefault(id(entry), f"param{position}"), entry
            else:
                yield entry


def _entries(group: Mapping[str, Any]) -> list[Any]:
    """The tensors or (name, tensor) pairs of a parameter group; torch keeps names in a list "param_names"."""
    params = group["params"]
    if isinstance(params, Tensor):
        params = [params]
    elif isinstance(params, Mapping):
        params = list(params.items())
    names = group.get("param_names")
    params = list(params)
    return list(zip(names, params, strict=True)) if names else params


def _group_of(groups: Iterable[Mapping[str, Any]], *, owners: Mapping[int, _Owner]) -> dict[int, int]:
    """id of a tensor -> index of its group."""
    group_of: dict[int, int] = {}
    for index, group in enumerate(groups):
        for entry in _entries(group):
            name, tensor = ("", entry) if isinstance(entry, Tensor) else entry
            if id(tensor) not in owners:
                raise BadInputError(
                    f"group {index} of the optimizer holds a parameter {name!r} of shape {tuple(tensor.shape)} that "
                    "the module does not have: register it on the module, or leave it out of the optimizer"
                )
            if group_of.setdefault(id(tensor), index) != index:
                raise BadInputError(
                    f"parameter {owners[id(tensor)].name!r} is in groups {group_of[id(tensor)]} and {index} of the "
                    "optimizer: give it one learning rate and weight decay, in one group"
                )
    return group_of


def _module_types(module: nn.Module) -> dict[str, str]:
    """Parameter name (every alias) -> class name of the module that holds it."""
    return {
        f"{prefix}.{name}" if prefix else name: type(child).__name__
        for prefix, child in module.named_modules(remove_duplicate=False)
        for name, _ in child.named_parameters(recurse=False, remove_duplicate=False)
    }


def _unnamed_heads(source: Any) -> Sequence[int]:
    """ids of weights that are a network's heads by their place, though their names say something else or nothing.

    A forward pass would tell, but plans are made without an input, and of named parameters too. So it is the last of
    all matrices, of a linear layer, not tied, unless one of these rules leaves it in doubt:

    1. By name: another one is a head (but `fc`, where it feeds the last), or this one is of a condition or a choice.
    2. By layer: its layer has another one like it.
    3. By width: a table of tokens takes what it gives, and may be the head. Or two matrices take and two give that
       width, as layers hand it on; but for a table with as many rows, of the tokens that it predicts.
    4. It is one of twins of one width, such as two critics. Twins of several, an actor and a critic, are all heads.
    5. It comes after images: convolutions end right before it in fewer channels than they take.
    """
    module = source if isinstance(source, nn.Module) else None
    types, layers = _module_types(module) if module is not None else {}, _Layers(module)
    matrices = {name: t for name, t in _named(source) if not isinstance(t, UninitializedParameter) and t.dim() > 1}
    name, tensor = next(reversed(matrices.items()), ("", None))
    is_linear = types[name].endswith("Linear") if name in types else name.rpartition(".")[2] == "weight"
    if tensor is None or tensor.dim() != 2 or not is_linear or sum(t is tensor for t in matrices.values()) > 1:
        return ()
    roles = {n: role_of(n, shape=t.shape, module_type=types.get(n, "")) for n, t in matrices.items()}
    heads, before = [n for n, role in roles.items() if role is Role.HEAD], list(matrices)[-2:-1]
    if heads and (heads != before or heads[0].split(".")[-2] != "fc" or matrices[heads[0]].shape[0] != tensor.shape[1]):
        return ()
    layer = layers.layer(name)
    # What is called mlp inside a layer belongs to the layer.
    allowed = (Role.OTHER,) if heads or layer is not None else (Role.OTHER, Role.MLP)
    if roles[name] not in allowed or any(map(_NO_HEAD.match, name.split("."))):
        return ()
    rest, width = name.removeprefix(layer or name), tensor.shape[0]
    if rest and any(layers.layer(n) == n.removesuffix(rest) for n in matrices if n != name and n.endswith(rest)):
        return ()
    flat = {n: t.shape for n, t in matrices.items() if t.dim() == 2}
    # Without a module, what has no bias may be a table. With one, linear layers may be called embeddings.
    no_tables = {n for n, kind in types.items() if kind.endswith("Linear") or roles.get(n) is not Role.EMBEDDING}
    no_tables |= {f"{n.removesuffix('bias')}weight" for n, _ in _named(source) if n.endswith("bias")}
    tables = [shape for n, shape in flat.items() if n != name and n.endswith("weight") and n not in no_tables]
    hands_on = min(sum(shape[side] == width for shape in flat.values()) for side in (0, 1)) > 1
    if any(cols == width for _, cols in tables) or (hands_on and all(rows != width for rows, _ in tables)):
        return ()
    twins = [name]
    while twin := _twin(twins[-1], matrices, roles):
        twins.append(twin)
    alike = len(twins) > 1 and len({matrices[n].shape[0] for n in twins}) == 1
    return () if alike or _after_images(matrices, roles, types, layers) else [id(matrices[n]) for n in twins]


def _twin(name: str, matrices: Mapping[str, Tensor], roles: Mapping[str, Role]) -> str | None:
    """The matrix in the place of `name` in the module right before one that holds `name`, where of both each takes the
    same and not what the other gives: two critics, a mean and a variance."""
    parts, names = name.split("."), list(matrices)
    for depth in range(len(parts) - 1):
        first = next(n for n in names if n.startswith(".".join(parts[: depth + 1]) + "."))
        before = names[names.index(first) - 1].split(".") if first != names[0] else []
        twin = ".".join([*before[: depth + 1], *parts[depth + 1 :]])
        if before[:depth] != parts[:depth] or twin == name or roles.get(twin) is not roles[name]:
            continue
        own, other = matrices[name].shape, matrices[twin].shape
        fed = matrices[".".join(before)].shape[0] == matrices[first].shape[1]
        if len(other) == 2 and other[1] == own[1] and not fed and not any(map(_NO_HEAD.match, twin.split("."))):
            return twin
    return None


def _after_images(
    matrices: Mapping[str, Tensor], roles: Mapping[str, Role], types: Mapping[str, str], layers: "_Layers"
) -> bool:
    """Whether the last convolution gives fewer channels than it takes, and no layer comes after it."""
    names = list(matrices)
    convs = [n for n in names if matrices[n].dim() > 2 and roles[n] in (Role.CONV, Role.OTHER)]
    convs = [n for n in convs if "Conv" in types.get(n, "Conv")]  # not a table of features, such as a plane
    if not convs or any(layers.layer(n) is not None for n in names[names.index(convs[-1]) + 1 :]):
        return False
    gives, takes = matrices[convs[-1]].shape[:2]
    return takes < gives if _TRANSPOSED_TYPE.fullmatch(types.get(convs[-1], "")) else gives < takes


# -- depth ------------------------------------------------------------------------------------------------------------


class _Layers:
    """Numbers the layers of a network in order of appearance.

    A layer is an entry of a ModuleList or Sequential that itself holds two or more modules with parameters; lists nest
    (a UNet's resnets lie inside its down blocks), and the innermost layer counts. Lists inside an attention, mlp or
    mixture-of-experts module are parts of a layer.
    """

    def __init__(self, module: nn.Module | None):
        self._module = module
        self._numbers: dict[str, int] = {}

    def depth(self, name: str) -> int | None:
        layer = self.layer(name)
        return None if layer is None else self._numbers.setdefault(layer, len(self._numbers))

    def layer(self, name: str) -> str | None:
        """Name of the innermost layer that holds the parameter `name`."""
        return self._from_modules(name) if self._module is not None else self._from_name(name)

    def _from_modules(self, name: str) -> str | None:
        module = self._module
        assert module is not None
        layer = None
        parts = name.split(".")[:-1]
        for position, part in enumerate(parts):
            is_list = isinstance(module, nn.ModuleList | nn.Sequential)
            module = getattr(module, part)  # get_submodule is not there in a scripted module
            if is_list and sum(any(True for _ in m.parameters(recurse=False)) for m in module.modules()) > 1:
                layer = ".".join(parts[: position + 1])
            if isinstance(module, nn.ModuleList | nn.Sequential):
                continue
            if _ONE_LAYER_TYPE.search(type(module).__name__) or _ONE_LAYER_NAME.fullmatch(part):
                break
        return layer

    @staticmethod
    def _from_name(name: str) -> str | None:
        """The name up to its first number, if a module lies between: blocks.3.attn.weight, but not net.0.weight."""
        parts = name.split(".")
        position = next((i for i, part in enumerate(parts[:-2]) if part.isdigit()), None)
        return None if position is None else ".".join(parts[: position + 1])
