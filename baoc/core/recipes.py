"""Recipes: a spec for each role of a network, with multiples of the learning rate and betas, under one name.

RECIPES are published methods as their authors run them; those named `_lean` also have cheap states on embedding and
head, and `muon8_qk` is a mixture of two that measured best (experiments/LOG.md).
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import Any, cast

from baoc.core import own_code
from baoc.core.catalogue import SPECS, WEIGHTS, removal_message, with_weights
from baoc.core.rule_tags import RULE_INFOS
from baoc.errors import BadInputError, did_you_mean
from baoc.types import Block, Part, Plan, Role

FALLBACK = "adamw"  # the spec that applies to every block
HIDDEN = "hidden"  # recipe key of every matrix that is neither embedding nor head
FIRST = "first"  # recipe key of hidden matrices of the first layer
OUTER_ROLES = (Role.EMBEDDING, Role.HEAD, Role.NORM)
PARTS_OF_ROLE: Mapping[Role, tuple[Part, ...]] = {Role.ATTENTION: (Part.QK, Part.VO), Role.MLP: (Part.IN, Part.OUT)}
RECIPE_KEYS: tuple[str, ...] = (
    *(role.value for role in OUTER_ROLES),
    HIDDEN,
    FIRST,
    *(
        key
        for role in Role
        if role not in OUTER_ROLES
        for key in (role.value, *(f"{role.value}_{part.value}" for part in PARTS_OF_ROLE.get(role, ())))
    ),
)
_SUFFIXES = (".yaml", ".yml", ".json")  # .json: the record of a race
BY_RACE = "race: "  # the source of a recipe that a race chose begins with this; the verdict follows
RACED = "raced"  # `recipe=raced`: the winner of an earlier race on this network
NO_RECIPE = "none"  # `recipe=none` leaves the choice to an allocator


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTuning:
    """A recipe's settings for one block: a multiple of the parameter group's `lr`, and betas in place of the group's.
    Raises ValueError for values that a recipe cannot have."""

    lr: float = 1.0
    betas: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.lr < inf or not all(0 <= beta < 1 for beta in self.betas or ()):
            raise ValueError(f"a multiple of the rate of {self.lr} with betas {self.betas} is of no recipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Multiples of the learning rate by rule and role, and betas by rule. A rule may be given by a prefix of its name:
    `foam` is foam_l2 and foam_l3. A block's multiple is that of its rule times that of its role."""

    lr: Mapping[str, float] = field(default_factory=dict[str, float])
    betas: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])

    def __post_init__(self) -> None:
        for lr, betas in (*((lr, None) for lr in self.lr.values()), *((1.0, betas) for betas in self.betas.values())):
            BlockTuning(lr=lr, betas=betas)

    @property
    def text(self) -> str:
        """`2 times the learning rate for adamw, muon; another 2 times on attention_qk; betas 0.9, 0.95 for muon`."""
        of_rules: dict[float, list[str]] = {}
        for key, lr in self.lr.items():
            if key not in RECIPE_KEYS and lr != 1:
                of_rules.setdefault(lr, []).append(key)
        told = [f"{lr:.3g} times the learning rate for {', '.join(rules)}" for lr, rules in of_rules.items()]
        told = told or ["the learning rate as given"]
        told += [f"another {lr:.3g} times on {key}" for key, lr in self.lr.items() if key in RECIPE_KEYS and lr != 1]
        told += [f"betas {', '.join(f'{beta:g}' for beta in betas)} for {rule}" for rule, betas in self.betas.items()]
        return "; ".join(told)

    def of(self, block: Block, *, rule: str) -> BlockTuning | None:
        """Settings of a block that runs `rule`; None if they are the parameter group's."""
        names = list(_prefixes(rule))
        by_rule = next((self.lr[name] for name in names if name in self.lr), 1.0)
        by_role = next((self.lr[key] for key in recipe_keys(block) if key in self.lr), 1.0)
        betas = next((self.betas[name] for name in names if name in self.betas), None)
        tuning = BlockTuning(lr=by_rule * by_role, betas=betas)
        return None if tuning == BlockTuning() else tuning


def tuning_of(plan: Plan) -> Tuning | None:
    """The learning rates and betas that a plan sets; None if it sets none."""
    basis = plan.basis
    return Tuning(lr=basis.lr, betas=basis.betas) if basis is not None and (basis.lr or basis.betas) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One spec per role, with learning rates and betas.

    Args:
        name: One line of text.
        description: One line for `--list recipes`.
        source: Where the method is published.
        specs: Key (RECIPE_KEYS) -> spec. The most specific key counts: `first`, `attention_qk`, `attention`, `hidden`;
            norms, embedding and head have their own key alone. Roles without a spec run `fallback`.
        lr: Rule or role -> multiple of the learning rate.
        betas: Rule -> betas, in place of the parameter group's.
        fallback: Specs for blocks to which the recipe's spec does not apply: the first that does, at last fp32 AdamW.
        weights: Weights format of all roles but norms, where a spec does not name one by "+".
        matching: Updates are scaled to the RMS of AdamW's, so that all rules can run at one learning rate.
        blocks: Block -> spec, which overrides its role: an allocator's plan for one network, written down.
        share: State on Llama 130M as a share of fp32 AdamW's; None outside of RECIPES.
    """

    name: str
    description: str = ""
    source: str = ""
    specs: Mapping[str, str] = field(default_factory=dict[str, str])
    lr: Mapping[str, float] = field(default_factory=dict[str, float])
    betas: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    fallback: tuple[str, ...] = ()
    weights: str = "native"
    matching: bool = True
    blocks: Mapping[str, str] = field(default_factory=dict[str, str])
    share: float | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def title(self) -> str:
        """The name, with "(changed)" if it is in RECIPES and this recipe differs from the one there."""
        changed = self.name in RECIPES and replace(self, share=None) != replace(RECIPES[self.name], share=None)
        return f"{self.name} (changed)" if changed else self.name

    @property
    def tuning(self) -> Tuning | None:
        return Tuning(lr=self.lr, betas=self.betas) if self.lr or self.betas else None

    @property
    def needs_part_blocks(self) -> bool:
        """Whether it names parts of attention or mlp, so that blocks have to be made by part."""
        return bool(self.untold_parts(()))

    def untold_parts(self, blocks: Sequence[Block]) -> list[str]:
        """Its keys of parts that no block has, or that a block of their role lacks, as one tensor of query, key and
        value does. Such a block goes by a coarser key, so that it runs another recipe than the one that is named."""
        untold: list[str] = []
        for role, parts in PARTS_OF_ROLE.items():
            there = {block.part for block in blocks if block.role is role}
            untold += [f"{role.value}_{part.value}" for part in parts if part not in there or None in there]
        return [key for key in untold if key in self.specs or key in self.lr]

    def names_spec_for(self, block: Block) -> bool:
        """Whether it names a spec for the block, by the block's name or one of its keys; else the block falls back."""
        return block.name in self.blocks or any(key in self.specs for key in recipe_keys(block))

    def preferred_spec(self, block: Block) -> tuple[str, str]:
        """(the recipe's key that decides for a block, or the block's name; the spec under it)."""
        if block.name in self.blocks:
            return block.name, self._with_weights(self.blocks[block.name], role=block.role)
        for key in recipe_keys(block):
            if key in self.specs:
                return key, self._with_weights(self.specs[key], role=block.role)
        return block.role.value, self._with_weights((*self.fallback, FALLBACK)[0], role=block.role)

    def specs_in_order(self, block: Block) -> tuple[str, ...]:
        """Specs of a block in order of preference. It runs the first that applies to it."""
        fallbacks = [self._with_weights(spec, role=block.role) for spec in (*self.fallback, FALLBACK)]
        return tuple(dict.fromkeys((self.preferred_spec(block)[1], *fallbacks, FALLBACK)))

    @property
    def all_specs(self) -> tuple[str, ...]:
        """Names of all specs that some block may run, fallbacks included."""
        specs = [*self.specs.values(), *self.blocks.values(), *self.fallback, FALLBACK]
        names = [self._with_weights(spec, role=role) for spec in specs for role in (Role.OTHER, Role.NORM)]
        return tuple(dict.fromkeys((*names, FALLBACK)))

    def _with_weights(self, spec: str, *, role: Role) -> str:
        """The spec in the recipe's weights format, unless it names one by "+", or the role is a norm."""
        unchanged = role is Role.NORM or self.weights == "native" or "+" in spec
        return spec if unchanged else with_weights(SPECS[spec], self.weights).name


def recipe_keys(block: Block) -> Iterator[str]:
    """Keys of a recipe that apply to a block, the most specific first."""
    if block.role in OUTER_ROLES:
        yield block.role.value
        return
    if block.depth == 0:
        yield FIRST
    if block.part is not None:
        yield f"{block.role.value}_{block.part.value}"
    yield block.role.value
    yield HIDDEN


def _prefixes(rule: str) -> Iterator[str]:
    """The rule's name, then its prefixes: foam_l2, foam."""
    parts = rule.split("_")
    yield from ("_".join(parts[:count]) for count in range(len(parts), 0, -1))


RULE_PREFIXES: tuple[str, ...] = tuple(
    dict.fromkeys(name for rule in RULE_INFOS for name in reversed(list(_prefixes(rule))))
)


_KEYS = tuple(item.name for item in fields(Recipe) if item.name not in ("specs", "share"))  # in a file, beside roles


# -- checks -----------------------------------------------------------------------------------------------------------
def _check(recipe: Recipe) -> None:
    if recipe.name in ("", NO_RECIPE) or "\n" in recipe.name:
        raise BadInputError(f"a recipe is called {recipe.name!r}: give it a name of one line, other than {NO_RECIPE}")
    for role, spec in recipe.specs.items():
        if role not in RECIPE_KEYS:
            close = did_you_mean(role, (*RECIPE_KEYS, *_KEYS), prefix="recipe.")
            raise BadInputError(
                f"unknown key recipe.{role} of recipe {recipe.name}{close}\nroles are {', '.join(RECIPE_KEYS)}; "
                f"beside them a recipe has {', '.join(_KEYS)}"
            )
        _check_spec(spec, key=f"recipe.{role}")
    of_blocks = [(f"recipe.blocks.{block}", spec) for block, spec in recipe.blocks.items()]
    for key, spec in [*of_blocks, *(("recipe.fallback", spec) for spec in recipe.fallback)]:
        _check_spec(spec, key=key)
    if recipe.weights not in WEIGHTS:
        raise BadInputError(f"recipe.weights={recipe.weights} is not allowed: choose one of {', '.join(WEIGHTS)}")
    for key, factor in recipe.lr.items():
        if key not in (*RULE_PREFIXES, *RECIPE_KEYS):
            raise _unknown_in("lr", key, allowed=(*RULE_PREFIXES, *RECIPE_KEYS))
        if not _is_number(factor) or not 0 < factor < 1e6:
            allowed = "a multiple of the rate, above 0 and below a million"
            raise BadInputError(f"recipe.lr.{key}={factor} is not allowed: it must be {allowed}")
    for key, betas in recipe.betas.items():
        if key not in RULE_PREFIXES:
            raise _unknown_in("betas", key, allowed=RULE_PREFIXES)
        if len(betas) != 2 or not all(_is_number(beta) and 0 <= beta < 1 for beta in betas):
            raise BadInputError(f"recipe.betas.{key}={list(betas)} is not allowed: it must be two numbers in [0, 1)")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_spec(spec: object, *, key: str) -> None:
    if not isinstance(spec, str) or spec not in SPECS:
        if message := removal_message(str(spec)):
            raise BadInputError(f"{key}: {message}")
        raise BadInputError(
            f"{key}={spec}: there is no such optimizer spec{did_you_mean(spec, SPECS)}\n"
            "`python run.py --list specs` shows every one"
        )


def _unknown_in(group: str, key: str, *, allowed: tuple[str, ...]) -> BadInputError:
    close = did_you_mean(key, allowed, prefix=f"recipe.{group}.")
    which = "rules, or beginnings of their names," if group == "betas" else "rules, beginnings of their names, or roles"
    return BadInputError(
        f"unknown key recipe.{group}.{key}{close}\nit goes by {which} such as muon, foam"
        + (f"; roles are {', '.join(RECIPE_KEYS)}" if group == "lr" else "")
        + "; `python run.py --list rules` shows every rule"
    )


# -- as plain values --------------------------------------------------------------------------------------------------
def recipe_node(recipe: Recipe) -> dict[str, Any]:
    """A recipe as the content of a file: roles beside its other keys."""
    return {
        "name": recipe.name,
        "description": recipe.description,
        "source": recipe.source,
        **{role: recipe.specs.get(role) for role in RECIPE_KEYS},
        "lr": dict(recipe.lr),
        "betas": {rule: list(betas) for rule, betas in recipe.betas.items()},
        "fallback": list(recipe.fallback),
        "weights": recipe.weights,
        "matching": recipe.matching,
        "blocks": dict(recipe.blocks),
    }


def recipe_from_node(node: Mapping[str, Any], *, name: str = "") -> Recipe:
    """The recipe of a node as `recipe_node` or a file has it; null counts as absent. `base` of the node names a recipe
    to start from, `name` is the default of its name. Raises BadInputError."""
    values = {str(key): value for key, value in node.items() if value is not None}
    for key in ("name", "base", "description", "source"):
        if not isinstance(text := values.get(key, ""), str):
            raise BadInputError(f"recipe.{key}={text} is not allowed: it must be text")
    name = values.pop("name", name)
    base = find_recipe(values.pop("base")) if "base" in values else Recipe(name=name or "unnamed")
    specs = {**base.specs, **{key: value for key, value in values.items() if key not in _KEYS}}
    lr = {**base.lr, **_mapping(values.get("lr"), key="lr")}
    betas = {**base.betas, **{k: _pair(v, key=k) for k, v in _mapping(values.get("betas"), key="betas").items()}}
    fallback = values.get("fallback", base.fallback)
    if isinstance(fallback, str) or not isinstance(fallback, list | tuple):
        raise BadInputError(f"recipe.fallback={fallback} is not allowed: it must be a list of specs")
    matching = values.get("matching", base.matching)
    if not isinstance(matching, bool):
        raise BadInputError(f"recipe.matching={matching} is not allowed: it must be true or false")
    return Recipe(
        name=name or base.name,
        description=values.get("description", base.description),
        source=values.get("source", base.source),
        specs=specs,
        lr=lr,
        betas=betas,
        fallback=tuple(cast("list[str]", fallback)),
        weights=str(values.get("weights", base.weights)),
        matching=matching,
        blocks={**base.blocks, **_flattened(_mapping(values.get("blocks"), key="blocks"))},
    )


def _mapping(value: object, *, key: str) -> dict[str, Any]:
    """The value as a mapping, without keys of None. Raises BadInputError if it is none."""
    if value is not None and not isinstance(value, Mapping):
        raise BadInputError(f"recipe.{key}={value} is not allowed: it must be a group of keys, such as {{muon: ...}}")
    mapping = cast("Mapping[str, Any]", value or {})
    return {str(name): item for name, item in mapping.items() if item is not None}


def _flattened(blocks: Mapping[str, Any]) -> dict[str, Any]:
    """Block name -> spec. A command line nests names with dots as groups: recipe.blocks.layers.0.mlp."""
    flat: dict[str, Any] = {}
    for name, value in blocks.items():
        inner = _flattened(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else {"": value}
        flat |= {f"{name}.{rest}".rstrip("."): spec for rest, spec in inner.items() if spec is not None}
    return flat


def _pair(value: object, *, key: str) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(cast("list[Any]", value)) != 2:
        raise BadInputError(f"recipe.betas.{key}={value} is not allowed: it must be two numbers in [0, 1)")
    return cast("tuple[float, float]", tuple(cast("list[float]", value)))


def choosing_nothing(given: str, *, idle: str = "", risk: str = "", objective: str = "") -> list[str]:
    """A sentence for each setting that chooses no spec beside `given`, a recipe or an allocator of one spec.

    `idle`: settings without any effect. `risk` and `objective`: empty at their defaults.
    """
    told = {
        idle: "without effect",
        f"risk={risk}": "prices the plan and chooses no spec" if risk else "",
        f"objective={objective}": "chooses how a batch is run and no spec" if objective else "",
    }
    return [f"{key}: {what}, as {given} says what every block runs" for key, what in told.items() if key and what]


def find_recipe(recipe: str | Path | Mapping[str, Any] | Recipe) -> Recipe:
    """A recipe by name, from a file, from plain values, or as it is. Raises BadInputError."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Mapping):
        return recipe_from_node(_non_empty_mapping(recipe, recipe=dict(recipe)))
    name = str(recipe)
    if name in RECIPES:
        return RECIPES[name]
    if names_recipe_file(name):
        return read_recipe(Path(name))
    if (point := own_code.entry_points_of("baoc.recipes").get(name)) is not None:
        with own_code.faults("recipe", name):
            value: Any = point.load()
        return value if isinstance(value, Recipe) else recipe_from_node(_mapping(value, key=""), name=name)
    if (measured := measured_recipes().get(name)) is not None:
        return measured
    if name == RACED:
        raise BadInputError(
            'recipe="raced" is of run.py, which knows the data that it races on: give the file of the race that is '
            'yours, such as recipe="outputs/races/NAME.json"; its "lr" is the learning rate that was best'
        )
    close = did_you_mean(name, [*RECIPES, *measured_recipes(), RACED])
    raise BadInputError(
        f"recipe={name}: there is no such recipe{close}\nallowed: {', '.join(RECIPES)}, one of the measured table, "
        f"{RACED}, or a FILE.yaml with a spec by role; `python run.py --list recipes` says what each is"
    )


def names_recipe_file(text: str) -> bool:
    """Whether `text` ends in .yaml, .yml or .json. The file need not exist."""
    return text.endswith(_SUFFIXES)


def read_recipe(path: Path) -> Recipe:
    """The recipe of a YAML file, or of a race's record. Raises BadInputError."""
    import yaml

    from baoc.core.yaml_files import read_yaml

    try:
        node = read_yaml(Path(os.path.expanduser(path)).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadInputError(
            f"recipe={path}: there is no such file; give the path of one with a spec by role, or a name of "
            "`python run.py --list recipes`"
        ) from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise BadInputError(f"recipe={path} cannot be read: {error}") from error
    recipe: Any = node
    if isinstance(node, Mapping) and "verdict" in node:  # the record of a race
        recipe = cast("Mapping[str, Any]", node).get("recipe")
        if recipe is None:
            raise BadInputError(
                f"recipe={path} is a race that chose a plan by block, measured on a network of another size, and holds "
                "no recipe: leave recipe out, and the plan is made for this network"
            )
    try:
        return recipe_from_node(_non_empty_mapping(recipe, recipe=path), name=path.stem)
    except RecursionError:
        raise BadInputError(f"recipe={path} leads back to itself by its base: name another base") from None


def _non_empty_mapping(node: object, *, recipe: object) -> Mapping[str, Any]:
    """Returns the node. Raises BadInputError, which names the `recipe`, if it is no mapping or has no value."""
    if not isinstance(node, Mapping) or all(value is None for value in cast("Mapping[str, Any]", node).values()):
        raise BadInputError(f"recipe={recipe} must hold roles and specs, such as `hidden: muon_int8`")
    return cast("Mapping[str, Any]", node)


@cache
def measured_table() -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """Family -> its nodes of measured.json, one of each size, which `baoc.core.measured` reads."""
    return json.loads((files("baoc.core") / "measured.json").read_text(encoding="utf-8"))["families"]


@cache
def measured_recipes() -> Mapping[str, Recipe]:
    """Recipe name -> recipe, of all families and sizes in the measured table."""
    nodes = [row["recipe"] for sizes in measured_table().values() for size in sizes for row in size["recipes"]]
    return {node["name"]: recipe_from_node(node) for node in nodes}


# -- the catalogue ----------------------------------------------------------------------------------------------------


def _by_role(hidden: str, *, embedding: str = FALLBACK, head: str | None = None, **others: str) -> dict[str, str]:
    return {"embedding": embedding, "head": head or embedding, "norm": FALLBACK, HIDDEN: hidden, **others}


_ADAMW = "arXiv 1711.05101"
_ADAMW8, _ADAMW4 = "arXiv 2110.02861", "arXiv 2309.01507"
_MUON, _MUON8 = "kellerjordan.github.io/posts/muon, arXiv 2502.16982", "arXiv 2509.23106"
_FOAM, _FACTORED = "arXiv 2512.07112", "arXiv 1804.04235"
_LION, _SIGNUM = "arXiv 2302.06675", "arXiv 1802.04434"
_SCALE, _SLIM = "arXiv 2506.16659", "arXiv 2503.01843"

_MOMENTUM: dict[str, Any] = {"betas": {"muon": (0.95, 0.95)}}  # Muon reads the first one only
_LION_BETAS: dict[str, Any] = {"betas": {"lion": (0.9, 0.99)}}


RECIPES: dict[str, Recipe] = {}
# name, state on Llama 130M as a share of fp32 AdamW's, source, specs by role, description, other fields of Recipe
_ROWS: tuple[tuple[str, float, str, dict[str, str], str, dict[str, Any]], ...] = (
    ("adamw", 1.0000, _ADAMW, _by_role("adamw"), "fp32 AdamW everywhere", {}),
    ("adamw8", 0.2657, _ADAMW8, _by_role("adamw_int8", embedding="adamw_int8"), "8-bit AdamW, norms in fp32", {}),
    ("adamw4", 0.1329, _ADAMW4, _by_role("adamw_int4", embedding="adamw_int4"), "4-bit AdamW, norms in fp32", {}),
    ("muon", 0.6833, _MUON, _by_role("muon"), "Muon on hidden matrices, fp32 AdamW on the rest", _MOMENTUM),
    (
        "muon8", 0.4508, _MUON8, _by_role("muon_int8"),
        "8-bit Muon on hidden matrices, fp32 AdamW on the rest", _MOMENTUM,
    ),
    (
        "muon8_lean", 0.1816, _MUON8, _by_role("muon_int8", embedding="adamw_int8"),
        "8-bit Muon on hidden matrices, 8-bit AdamW on embedding and head", {**_MOMENTUM, "fallback": ("adamw_int8",)},
    ),
    (
        "muon8_qk", 0.1746, f"own, of {_MUON8} and {_FOAM}",
        _by_role("muon_int8", embedding="adamw_int8", attention_qk="foam_l2_int8"),
        "muon8_lean with 8-bit FOAM at twice the rate on queries and keys",
        {**_MOMENTUM, "fallback": ("adamw_int8",), "lr": {"attention_qk": 2.0}},
    ),
    (
        "muon4_lean", 0.0909, _MUON8, _by_role("muon_int4", embedding="adamw_int4"),
        "4-bit Muon on hidden matrices, 4-bit AdamW on embedding and head", {**_MOMENTUM, "fallback": ("adamw_int4",)},
    ),
    (
        "foam", 0.5250, _FOAM, _by_role("foam_l2"),
        "FOAM at level 2 on hidden matrices with its own step size, fp32 AdamW on the rest", {"matching": False},
    ),
    (
        "foam8", 0.4087, _FOAM, _by_role("foam_l2_int8"),
        "8-bit FOAM at level 2 on hidden matrices, fp32 AdamW on the rest", {},
    ),
    (
        "foam8_lean", 0.1396, _FOAM, _by_role("foam_l2_int8", embedding="adamw_int8"),
        "8-bit FOAM at level 2 on hidden matrices, 8-bit AdamW on embedding and head", {"fallback": ("adamw_int8",)},
    ),
    (
        "adafactor_m8", 0.1338, _FACTORED, _by_role("adafactor_momentum_int8", embedding="adafactor_momentum_int8"),
        "Adafactor with 8-bit momentum on all matrices", {},
    ),
    (
        "scale", 0.0918, _SCALE, _by_role("column_norm", embedding="column_norm", head="column_norm_momentum"),
        "column norms on all matrices, with momentum on the head alone: SCALE", {},
    ),
    (
        "scale8", 0.0245, _SCALE, _by_role("column_norm", embedding="column_norm", head="column_norm_momentum_int8"),
        "column norms on all matrices, with 8-bit momentum on the head alone", {},
    ),
    (
        "slimadam", 0.5006, _SLIM,
        _by_role(
            "adamw_shared_out", embedding="adamw_shared_in", attention="adamw", attention_qk="adamw_shared_in",
            attention_vo="adamw_shared_out",
        ),
        "AdamW with v shared by role: along fan-in for q, k, embedding and head, else along fan-out", {},
    ),
    (
        "slimadam8", 0.1335, _SLIM,
        _by_role(
            "adamw_shared_out_int8", embedding="adamw_shared_in_int8", attention="adamw_int8",
            attention_qk="adamw_shared_in_int8", attention_vo="adamw_shared_out_int8",
        ),
        "the same with 8-bit momentum", {"fallback": ("adamw_int8",)},
    ),
    ("lion", 0.5001, _LION, _by_role("lion", embedding="lion"), "Lion, norms in fp32 AdamW", _LION_BETAS),
    (
        "lion8", 0.1329, _LION, _by_role("lion_int8", embedding="lion_int8"),
        "8-bit Lion, norms in fp32 AdamW", _LION_BETAS,
    ),
    (
        "signum8", 0.1329, _SIGNUM, _by_role("signum_int8", embedding="signum_int8"),
        "8-bit Signum, norms in fp32 AdamW", {},
    ),
)  # fmt: skip
for _name, _share, _source, _specs, _text, _more in _ROWS:
    RECIPES[_name] = Recipe(name=_name, description=_text, source=_source, specs=_specs, share=_share, **_more)
