"""Roles of parameters, and their partition into blocks: by the user's patterns, the model's declaration, or a rule.

Only names, shapes and module types are read, so a model can be planned for without allocating it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

from baoc.errors import BadInputError
from baoc.types import Block, ParamInfo, Part, Role

By = Literal["auto", "layer_role", "layer_part", "layer", "role", "tensor", "model"]

_EMBEDDING = re.compile(r"embed|position|cls_token|class_token|mask_token|^(wte|wpe|pos|patchify)$", re.IGNORECASE)
_MODULATION = re.compile(r"adaln|ada_?ln|modulation|time_emb_proj|film", re.IGNORECASE)
_HEAD = re.compile(
    r"^(lm_head|classifier|classification_head|heads?|proj_out.*|final.*|conv_out|fc|score|output_projection|qa_outputs"
    r"|seq_relationship)$"
)
_ATTENTION = re.compile(r"attn|attention|^(q|k|v|o|qkv|out)_proj$|^(query|key|value|qkv)$", re.IGNORECASE)
_MLP = re.compile(
    r"mlp|ffn|feed_?forward|experts?$|^(ff|fc\d|w[123]|linear[12]|intermediate|(gate|up|down|gate_up)_proj)$",
    re.IGNORECASE,
)
# Parts of attention and mlp, by the name of the innermost module; a tensor of query, key and value has no part.
_FUSED = re.compile(r"qkv|kv_|c_attn|in_proj|query_key_value|key_value|to_kv", re.IGNORECASE)
_QK = re.compile(r"^((to_|add_)?[qk](_proj|_lin|_[ab]_proj)?|query|key|w[qk])$", re.IGNORECASE)
_VO = re.compile(
    r"^((to_|add_)?[vo](_proj|_lin)?|to_(add_)?out|value|w[vo]|out_(proj|lin)|c_proj|proj|output|dense)$", re.IGNORECASE
)
_IN = re.compile(
    r"^((gate|up|gate_up)_proj|fc1|c_fc|w[13]|wi(_\d)?|lin(ear)?1|intermediate|fc_in|dense_h_to_4h)$", re.IGNORECASE
)
_OUT = re.compile(r"^(down_proj|fc2|c_proj|w2|wo|lin(ear)?2|output|fc_out|dense_4h_to_h)$", re.IGNORECASE)


def role_of(name: str, *, shape: Sequence[int], module_type: str) -> Role:
    """Role of the parameter `name` of a module of class `module_type`, from type, shape and names of outer modules. The
    innermost name that matches attention or mlp wins: a feed-forward inside a module `attentions` is an mlp."""
    if len(shape) < 2 or module_type.lower().endswith("norm"):
        return Role.NORM
    parts = name.split(".")
    if any(_MODULATION.search(part) for part in parts) or re.search(r"norm\d*\.linear\.", name):
        return Role.MODULATION  # the second is diffusers' AdaLayerNorm: a linear layer inside a norm
    if module_type == "Embedding" or any(_EMBEDDING.search(part) for part in parts):
        return Role.EMBEDDING
    outside_layers = parts[: next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))]
    if any(_HEAD.match(part) for part in outside_layers):
        return Role.HEAD  # a proj_out inside a numbered layer is not the network's
    for part in reversed(parts):
        if _ATTENTION.search(part):
            return Role.ATTENTION
        if _MLP.search(part):
            return Role.MLP
    if module_type.startswith("Conv") and module_type != "Conv1D":  # GPT-2's Conv1D is a linear layer
        return Role.CONV
    if module_type == "MultiheadAttention":
        return Role.ATTENTION
    return Role.MLP if "output" in parts and outside_layers != parts else Role.OTHER  # BERT's layer.N.output.dense


def part_of(param: ParamInfo) -> Part | None:
    """The part of attention or mlp that a matrix is, by its name, else by its shape; None if neither tells. An mlp's
    input matrix has more rows than columns, its output matrix fewer. Attention's matrices have one shape."""
    layers = param.name.split(".")[:-1] or [param.name]
    if param.matrix_shape is None:
        return None
    if param.role is Role.ATTENTION and not _FUSED.search(param.name):
        return _first_match(layers, {Part.QK: _QK, Part.VO: _VO})
    if param.role is Role.MLP:
        rows, cols = param.matrix_shape
        by_shape = None if rows == cols or len(param.shape) != 2 else Part.IN if rows > cols else Part.OUT
        return _first_match(layers, {Part.IN: _IN, Part.OUT: _OUT}) or by_shape
    return None


def _first_match(layers: Sequence[str], patterns: Mapping[Part, re.Pattern[str]]) -> Part | None:
    """The part of the innermost layer whose name matches a pattern."""
    matches = (part for layer in reversed(layers) for part, pattern in patterns.items() if pattern.match(layer))
    return next(matches, None)


def partition(
    params: Sequence[ParamInfo],
    *,
    declared: Mapping[str, Sequence[str]] | None = None,
    patterns: Sequence[tuple[str, str]] = (),
    by: By | str = "layer_role",
) -> tuple[Block, ...]:
    """Puts every parameter into exactly one block, in order of first appearance.

    Args:
        params: Parameters of the network.
        declared: The model's own partition, block -> parameter names.
        patterns: The user's (block name, glob or regular expression) pairs. They override the model, and the first
            match wins. The block name may refer to groups of the expression (`layer\\1.attn`).
        by: The rule for all other parameters. "layer_part" also splits the model's blocks by parts of attention and
            mlp, but not those of patterns. "auto" is "layer_role", until planning takes "layer_part" in its place.

    Raises:
        BadInputError: A pattern matches no parameter, a parameter is declared twice, `by` is unknown, or there are no
            parameters.
    """
    if not params:
        raise BadInputError(
            "there is no trainable parameter to optimize: unfreeze one (requires_grad) or check the model"
        )
    if by not in _BY:
        raise BadInputError(f"unknown blocks.by {by!r}: choose one of {', '.join(_BY)}")
    assigned = _by_pattern(params, patterns=patterns)
    by_pattern = set(assigned)
    for name, block in _by_declaration(params, declared=declared or {}).items():
        assigned.setdefault(name, block)
    members: dict[str, list[ParamInfo]] = {}
    for param in params:
        name = assigned.get(param.name) or _BY[by](param)
        part = part_of(param) if by == "layer_part" and param.name not in by_pattern else None
        members.setdefault(name if part is None else f"{name}.{part.value}", []).append(param)
    blocks = tuple(_block(name, tuple(in_block)) for name, in_block in members.items())
    _check(params, blocks=blocks)
    return blocks


def _layer_role(param: ParamInfo) -> str:
    """Name by layer and role; for a parameter with neither, as in a plain Sequential, by its module."""
    if param.depth is not None:
        return f"layer{param.depth}.{param.role.value}"
    if param.role is Role.OTHER:
        return f"other.{param.name.rpartition('.')[0] or param.name}"
    return param.role.value


def _layer(param: ParamInfo) -> str:
    return param.role.value if param.depth is None else f"layer{param.depth}"


_BY: dict[str, Callable[[ParamInfo], str]] = {
    "layer_role": _layer_role,
    "layer_part": _layer_role,
    "layer": _layer,
    "role": lambda param: param.role.value,
    "tensor": lambda param: param.name,
    "model": lambda _: "model",
    "auto": _layer_role,
}


def _by_pattern(params: Sequence[ParamInfo], *, patterns: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Parameter name -> block name, of parameters that a pattern matches."""
    assigned: dict[str, str] = {}
    for block, pattern in patterns:
        before = len(assigned)
        for param in params:
            if param.name not in assigned:
                names = (_match(name, block, pattern) for name in (param.name, *param.aliases))
                if matched := next(filter(None, names), None):
                    assigned[param.name] = matched
        if len(assigned) == before:
            raise BadInputError(
                f"blocks.patterns: {pattern!r} (block {block!r}) matches no parameter that an earlier pattern left. It "
                r"must match the whole name, as a glob (*.mlp.*) or a regular expression (.*\.mlp\..*); names are for "
                f"example {', '.join(param.name for param in params[:3])}"
            )
    return assigned


def _match(name: str, block: str, pattern: str) -> str | None:
    """The block name if `pattern` matches the whole of `name`, as a regular expression (groups expanded) or a glob."""
    try:
        match = re.fullmatch(pattern, name)
        if match is not None:
            return match.expand(block)
    except (re.error, IndexError):  # a glob such as *.bias is not a regular expression
        pass
    return block if fnmatchcase(name, pattern) else None


def _by_declaration(params: Sequence[ParamInfo], *, declared: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Parameter name -> block name by the model. Frozen parameters are ignored; a tied one counts once."""
    owner = {name: param.name for param in params for name in (param.name, *param.aliases)}
    assigned: dict[str, str] = {}
    block_of: dict[str, str] = {}
    for block, names in declared.items():
        for name in names:
            if block_of.setdefault(name, block) != block:
                raise BadInputError(
                    f"the model declares parameter {name!r} in two blocks, {block_of[name]!r} and {block!r}: "
                    "parameter_blocks() must hold every parameter exactly once"
                )
            if name in owner:
                assigned.setdefault(owner[name], block)
    return assigned


def _block(name: str, params: tuple[ParamInfo, ...]) -> Block:
    """A block with the role of most of its elements, and with the depth and part that all its parameters share."""
    sizes: dict[Role, int] = {}
    for param in params:
        sizes[param.role] = sizes.get(param.role, 0) + param.numel
    depths = {param.depth for param in params}
    parts = {part_of(param) for param in params}
    return Block(
        name=name,
        params=params,
        role=max(sizes, key=lambda role: sizes[role]),
        depth=depths.pop() if len(depths) == 1 else None,
        part=parts.pop() if len(parts) == 1 else None,
    )


def _check(params: Sequence[ParamInfo], *, blocks: Sequence[Block]) -> None:
    names = [param.name for block in blocks for param in block.params]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise BadInputError(f"parameters given twice: {', '.join(twice)}: give every parameter once")
    assert set(names) == {param.name for param in params}, "a parameter is in no block"
