"""Recipes: what each role of a network runs, as one value that has a name.

A recipe gives a spec to each role, and to rules and roles a multiple of the learning rate and betas of their own. The
rows of RECIPES are published methods, as their authors run them; those named `_lean` also have cheap states on
embedding and head.
"""

import json
from collections.abc import Iterator, Mapping
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

FALLBACK = "adamw"  # runs anywhere
HIDDEN = "hidden"  # every matrix that is neither embedding nor head
FIRST = "first"  # those of the first layer
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
_SUFFIXES = (".yaml", ".yml", ".json")  # the latter of a race
BY_RACE = "race: "  # begins the source of a recipe that a race chose; its verdict follows
RACED = "raced"  # `recipe=raced`: the winner of an earlier race on this network


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTuning:
    """A recipe's changes of one block's settings: a multiple of the group's `lr`, and betas in place of its own.

    Raises ValueError for values that no recipe can have.
    """

    lr: float = 1.0
    betas: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.lr < inf or not all(0 <= beta < 1 for beta in self.betas or ()):
            raise ValueError(f"a multiple of the rate of {self.lr} with betas {self.betas} is of no recipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Multiples of the learning rate by rule and role, and betas by rule. The first part of a rule's name stands for
    all that begin with it: `foam` for foam_l2 and foam_l3. A rule's and a role's multiple are multiplied."""

    lr: Mapping[str, float] = field(default_factory=dict[str, float])
    betas: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])

    def __post_init__(self) -> None:
        for lr, betas in (*((lr, None) for lr in self.lr.values()), *((1.0, betas) for betas in self.betas.values())):
            BlockTuning(lr=lr, betas=betas)

    def of(self, block: Block, *, rule: str) -> BlockTuning | None:
        """Learning rate and betas of a block that runs `rule`; None where they are the parameter group's."""
        names = list(_names_of(rule))
        by_rule = next((self.lr[name] for name in names if name in self.lr), 1.0)
        by_role = next((self.lr[key] for key in recipe_keys(block) if key in self.lr), 1.0)
        betas = next((self.betas[name] for name in names if name in self.betas), None)
        tuned = BlockTuning(lr=by_rule * by_role, betas=betas)
        return None if tuned == BlockTuning() else tuned


def tuning_of(plan: Plan) -> Tuning | None:
    """The learning rates and betas that a plan changes; None where it leaves them."""
    basis = plan.basis
    return Tuning(lr=basis.lr, betas=basis.betas) if basis is not None and (basis.lr or basis.betas) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One spec per role, and how fast it learns.

    Args:
        name: What it is called.
        description: One line for `--list recipes`.
        source: Where the method is published.
        specs: Key (RECIPE_KEYS) -> spec. The most specific key counts: `first`, `attention_qk`, `attention`, `hidden`;
            norms, embedding and head have their own key alone. Roles without a spec run `fallback`.
        lr: Rule or role -> multiple of the learning rate.
        betas: Rule -> betas, in place of the parameter group's.
        fallback: Specs that a block takes where its own does not apply, the first that does; at last fp32 AdamW.
        weights: Format of the weights of all roles but norms, where a spec does not name one.
        matching: Updates are scaled to the RMS of AdamW's, so that one learning rate serves all rules.
        blocks: Block -> spec, before its role's: an allocator's plan written down. They are names of one network.
        share: State on Llama 130M as a share of fp32 AdamW's, of rows of the catalogue.
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
        """Its name, with "(changed)" where a recipe of the catalogue was edited."""
        changed = self.name in RECIPES and replace(self, share=None) != replace(RECIPES[self.name], share=None)
        return f"{self.name} (changed)" if changed else self.name

    @property
    def tuning(self) -> Tuning | None:
        return Tuning(lr=self.lr, betas=self.betas) if self.lr or self.betas else None

    @property
    def needs_part_blocks(self) -> bool:
        """Whether parts of attention or mlp differ, for which blocks have to be made by part."""
        parts = {f"{role.value}_{part.value}" for role, held in PARTS_OF_ROLE.items() for part in held}
        return not parts.isdisjoint({*self.specs, *self.lr})

    def names_spec_for(self, block: Block) -> bool:
        """Whether it says what the block runs, so that no fallback stands in for what it names by other roles."""
        return block.name in self.blocks or any(key in self.specs for key in recipe_keys(block))

    def preferred_spec(self, block: Block) -> tuple[str, str]:
        """The key of the recipe that decides for a block (a role, or the block's own name), and the spec under it."""
        if block.name in self.blocks:
            return block.name, self._row(self.blocks[block.name], role=block.role)
        for key in recipe_keys(block):
            if key in self.specs:
                return key, self._row(self.specs[key], role=block.role)
        return block.role.value, self._row((*self.fallback, FALLBACK)[0], role=block.role)

    def specs_in_order(self, block: Block) -> tuple[str, ...]:
        """Specs of a block in order of preference: it runs the first that applies to its shape."""
        others = [self._row(spec, role=block.role) for spec in (*self.fallback, FALLBACK)]
        return tuple(dict.fromkeys((self.preferred_spec(block)[1], *others, FALLBACK)))

    @property
    def all_specs(self) -> tuple[str, ...]:
        """Names of all specs that some block may run, fallbacks included."""
        given = [*self.specs.values(), *self.blocks.values(), *self.fallback, FALLBACK]
        found = [self._row(spec, role=role) for spec in given for role in (Role.OTHER, Role.NORM)]
        return tuple(dict.fromkeys((*found, FALLBACK)))

    def _row(self, spec: str, *, role: Role) -> str:
        plain = role is Role.NORM or self.weights == "native" or "+" in spec
        return spec if plain else with_weights(SPECS[spec], self.weights).name


def recipe_keys(block: Block) -> Iterator[str]:
    """Names of a block's role, the most special first."""
    if block.role in OUTER_ROLES:
        yield block.role.value
        return
    if block.depth == 0:
        yield FIRST
    if block.part is not None:
        yield f"{block.role.value}_{block.part.value}"
    yield block.role.value
    yield HIDDEN


def _names_of(rule: str) -> Iterator[str]:
    """The rule's name, then its beginnings: foam_l2, foam."""
    parts = rule.split("_")
    yield from ("_".join(parts[:count]) for count in range(len(parts), 0, -1))


RULE_PREFIXES: tuple[str, ...] = tuple(
    dict.fromkeys(name for rule in RULE_INFOS for name in reversed(list(_names_of(rule))))
)


# -- checks -----------------------------------------------------------------------------------------------------------


def _check(recipe: Recipe) -> None:
    if not recipe.name or "\n" in recipe.name:
        raise BadInputError(f"a recipe is called {recipe.name!r}: give it a name of one line")
    for role, spec in recipe.specs.items():
        if role not in RECIPE_KEYS:
            close = did_you_mean(role, (*RECIPE_KEYS, *_KEYS), prefix="recipe.")
            raise BadInputError(
                f"unknown key recipe.{role} of recipe {recipe.name}{close}\nroles are {', '.join(RECIPE_KEYS)}; "
                f"beside them a recipe has {', '.join(_KEYS)}"
            )
        _check_spec(spec, key=f"recipe.{role}")
    others = {f"recipe.blocks.{block}": spec for block, spec in recipe.blocks.items()}
    for key, spec in [*others.items(), *(("recipe.fallback", spec) for spec in recipe.fallback)]:
        _check_spec(spec, key=key)
    if recipe.weights not in WEIGHTS:
        raise BadInputError(f"recipe.weights={recipe.weights} is not allowed: choose one of {', '.join(WEIGHTS)}")
    for key, factor in recipe.lr.items():
        if key not in (*RULE_PREFIXES, *RECIPE_KEYS):
            raise _unknown_in("lr", key, allowed=(*RULE_PREFIXES, *RECIPE_KEYS))
        if not isinstance(cast(object, factor), int | float) or isinstance(factor, bool) or not 0 < factor < 1e6:
            raise BadInputError(f"recipe.lr.{key}={factor} is not allowed: it must be a multiple of the rate, above 0")
    for key, betas in recipe.betas.items():
        if key not in RULE_PREFIXES:
            raise _unknown_in("betas", key, allowed=RULE_PREFIXES)
        numbers = [beta for beta in betas if isinstance(cast(object, beta), int | float) and 0 <= beta < 1]
        if len(betas) != 2 or len(numbers) != 2:
            raise BadInputError(f"recipe.betas.{key}={list(betas)} is not allowed: it must be two numbers in [0, 1)")


def _check_spec(spec: object, *, key: str) -> None:
    if not isinstance(spec, str) or spec not in SPECS:
        if told := removal_message(str(spec)):
            raise BadInputError(f"{key}: {told}")
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

_KEYS = tuple(item.name for item in fields(Recipe) if item.name not in ("specs", "share"))


def recipe_node(recipe: Recipe) -> dict[str, Any]:
    """A recipe in the words of a file: roles beside its other keys."""
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
    """Reads what `recipe_node` wrote, or a file; null counts as absent. `base` names a recipe to start from."""
    given = {str(key): value for key, value in node.items() if value is not None}
    for key in ("name", "base", "description", "source"):
        if not isinstance(text := given.get(key, ""), str):
            raise BadInputError(f"recipe.{key}={text} is not allowed: it must be text")
    name = given.pop("name", name)
    base = find_recipe(given.pop("base")) if "base" in given else Recipe(name=name or "unnamed")
    specs = {**base.specs, **{key: value for key, value in given.items() if key not in _KEYS}}
    lr = {**base.lr, **_mapping(given.get("lr"), key="lr")}
    betas = {**base.betas, **{k: _pair(v, key=k) for k, v in _mapping(given.get("betas"), key="betas").items()}}
    fallback = given.get("fallback", base.fallback)
    if isinstance(fallback, str) or not isinstance(fallback, list | tuple):
        raise BadInputError(f"recipe.fallback={fallback} is not allowed: it must be a list of specs")
    matching = given.get("matching", base.matching)
    if not isinstance(matching, bool):
        raise BadInputError(f"recipe.matching={matching} is not allowed: it must be true or false")
    return Recipe(
        name=name or base.name,
        description=given.get("description", base.description),
        source=given.get("source", base.source),
        specs=specs,
        lr=lr,
        betas=betas,
        fallback=tuple(cast("list[str]", fallback)),
        weights=str(given.get("weights", base.weights)),
        matching=matching,
        blocks={**base.blocks, **_joined(_mapping(given.get("blocks"), key="blocks"))},
    )


def _mapping(given: object, *, key: str) -> dict[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise BadInputError(f"recipe.{key}={given} is not allowed: it must be a group of keys, such as {{muon: ...}}")
    held = cast("Mapping[str, Any]", given or {})
    return {str(name): value for name, value in held.items() if value is not None}


def _joined(blocks: Mapping[str, Any]) -> dict[str, Any]:
    """Specs by block; a command line gives names as groups, recipe.blocks.layers.0.mlp."""
    found: dict[str, Any] = {}
    for name, spec in blocks.items():
        deeper = _joined(cast("Mapping[str, Any]", spec)) if isinstance(spec, Mapping) else {"": spec}
        found |= {f"{name}.{below}".rstrip("."): spec for below, spec in deeper.items() if spec is not None}
    return found


def _pair(value: object, *, key: str) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(cast("list[Any]", value)) != 2:
        raise BadInputError(f"recipe.betas.{key}={value} is not allowed: it must be two numbers in [0, 1)")
    return cast("tuple[float, float]", tuple(cast("list[float]", value)))


def find_recipe(given: str | Path | Mapping[str, Any] | Recipe) -> Recipe:
    """A recipe by name, from a YAML file, from plain values, or as it is. Raises BadInputError."""
    if isinstance(given, Recipe):
        return given
    if isinstance(given, Mapping):
        return recipe_from_node(_filled(given, given=dict(given)))
    if str(given) in RECIPES:
        return RECIPES[str(given)]
    if names_yaml_file(str(given)):
        return read_recipe(Path(given))
    if (point := own_code.entry_points_of("baoc.recipes").get(str(given))) is not None:
        with own_code.faults("recipe", str(given)):
            found: Any = point.load()
        return found if isinstance(found, Recipe) else recipe_from_node(_mapping(found, key=""), name=str(given))
    if (measured := measured_recipes().get(str(given))) is not None:
        return measured
    close = did_you_mean(given, [*RECIPES, *measured_recipes(), RACED])
    raise BadInputError(
        f"recipe={given}: there is no such recipe{close}\nallowed: {', '.join(RECIPES)}, one of the measured table, "
        f"{RACED}, or a FILE.yaml with a spec by role; `python run.py --list recipes` says what each is"
    )


def names_yaml_file(text: str) -> bool:
    """Whether `text` ends as a file of YAML or JSON does, whether the file exists or not."""
    return text.endswith(_SUFFIXES)


def read_recipe(path: Path) -> Recipe:
    import yaml

    from baoc.core.yaml_files import read_yaml

    try:
        node = read_yaml(path.expanduser().read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadInputError(
            f"recipe={path}: there is no such file; give the path of one with a spec by role, or a name of "
            "`python run.py --list recipes`"
        ) from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadInputError(f"recipe={path} cannot be read: {error}") from error
    held: Any = node
    if isinstance(node, Mapping) and "verdict" in node:  # the file of a race
        held = cast("Mapping[str, Any]", node).get("recipe")
        if held is None:
            raise BadInputError(
                f"recipe={path} is a race that chose a plan by block, measured on a network of another size, and holds "
                "no recipe: leave recipe out, and the plan is made for this network"
            )
    return recipe_from_node(_filled(held, given=path), name=path.stem)


def _filled(node: object, *, given: object) -> Mapping[str, Any]:
    if not isinstance(node, Mapping) or not node:
        raise BadInputError(f"recipe={given} must hold roles and specs, such as `hidden: muon_int8`")
    return cast("Mapping[str, Any]", node)


@cache
def measured_table() -> Mapping[str, Mapping[str, Any]]:
    """The shipped measurements of each family of networks, which `baoc.core.measured` reads."""
    return json.loads((files("baoc.core") / "measured.json").read_text(encoding="utf-8"))["families"]


@cache
def measured_recipes() -> Mapping[str, Recipe]:
    """Recipes of all families by name."""
    nodes = [held["recipe"] for family in measured_table().values() for held in family["recipes"]]
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

_MOMENTUM: dict[str, Any] = {"betas": {"muon": (0.95, 0.95)}}
_LION_BETAS: dict[str, Any] = {"betas": {"lion": (0.9, 0.99)}}


RECIPES: dict[str, Recipe] = {}
# name, state on Llama 130M as a share of fp32 AdamW's, source, specs by role, description, and what else a recipe has
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
