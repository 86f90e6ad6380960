"""How much recipes, and rules by role, changed the final loss in our studies, by family of networks.

A family is a kind of network and task: transformers for language, vision and diffusion. The table `measured.json` is
written by `python -m experiments.analysis.fit_measured` from the raw rows of the studies. A change is the difference
from a named recipe in the unit of the family's loss; below 0 is better. Each value names the size it was measured at,
and predicts nothing for other sizes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import log10
from typing import Any

from baoc.core.catalogue import SPECS
from baoc.core.recipes import Recipe, measured_table, recipe_from_node
from baoc.core.statistics import student_quantile
from baoc.types import ParamInfo, Role

AUTO = "auto"  # the family follows from the network
TRANSFORMER = 0.5  # share of the elements that attention and mlp have at least
FEW_CHANNELS = 4  # of images: a convolution with more is none that cuts patches
# Decades of size beyond the largest measured one, over which a measured multiple of the rate fades to 1.
FADING_DECADES = 2.0
KAPPA = 1.28  # standard deviations that a mean is charged with: the one-sided bound at 90 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the final loss: mean, the mean's standard deviation, and how many paired seeds it comes from.

    `multiple`: of the learning rate that the role has in the base, at which it was measured.
    """

    mean: float
    sd: float
    n: int
    multiple: float = 1.0

    @property
    def half(self) -> float:
        """Of its two-sided 90 % interval."""
        return student_quantile(0.95, degrees=max(self.n - 1, 1)) * self.sd

    def __str__(self) -> str:
        return f"{self.mean:+.4g} +- {self.half:.2g}"

    def bound(self, kappa: float) -> float:
        return self.mean + kappa * self.sd


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRecipe:
    """A whole recipe at its own best rate.

    Args:
        recipe: what was run.
        rate: multiple of fp32 AdamW's learning rate, for all rules alike.
        value: mean of the final loss.
        sd: standard deviation of it over seeds.
        change: against the family's reference.
        against: the same against other recipes, by name.
        uniform: one spec runs on all hidden matrices.
    """

    recipe: Recipe
    rate: float
    value: float
    sd: float
    change: Change
    changes_against: Mapping[str, Change]
    uniform: bool

    @property
    def name(self) -> str:
        return self.recipe.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The measurements of one family.

    Args:
        unit: of the loss.
        reference: the best uniform recipe, which changes are told against.
        base: the recipe of which single roles were replaced; None where none were.
        num_params: of the network.
        size: of the network, in words.
        steps: of a run.
        horizon: of a run, in words.
        recipes: whole ones, the best first.
        roles: role -> spec -> change against the base.
        weights: format of the weights -> change against fp32 weights, under 8-bit Muon.
    """

    name: str
    unit: str
    reference: str
    base: str | None
    num_params: int
    size: str
    steps: int
    horizon: str
    recipes: tuple[MeasuredRecipe, ...]
    roles: Mapping[str, Mapping[str, Change]] = field(default_factory=dict[str, Mapping[str, Change]])
    weights: Mapping[str, Change] = field(default_factory=dict[str, Change])

    def recipe(self, name: str) -> MeasuredRecipe:
        return next(one for one in self.recipes if one.name == name)

    def change_for(self, keys: Sequence[str], spec: str) -> Change | None:
        """The change of a block's role: of the first key that was measured."""
        return next((self.roles[key][spec] for key in keys if spec in self.roles.get(key, {})), None)


def faded_rate(rate: float, *, num_params: int, measured: int) -> float:
    """A multiple of the learning rate away from the size where it was measured.

    It holds up to that size and fades to 1 over FADING_DECADES beyond: updates of all rules have the size of
    AdamW's, for which AdamW's own rate is the guess where nothing was measured.
    """
    beyond = log10(max(num_params, 1) / max(measured, 1))
    return rate ** (1 - min(max(beyond, 0.0) / FADING_DECADES, 1.0))


def with_rate(recipe: Recipe, rate: float, *, by_role: Mapping[str, float] | None = None) -> Recipe:
    """The recipe with a multiple of the learning rate for all its rules alike, and others by role."""
    rules = {SPECS[row].rule: rate for row in recipe.all_specs} if rate != 1 else {}
    return replace(recipe, lr={**rules, **recipe.lr, **(by_role or {})})


def family_of(params: Sequence[ParamInfo]) -> str | None:
    """The family of a network, by its shapes and roles; None where it is no transformer of a measured kind.

    Language: a token embedding whose shape the head shares, and no images beside it that untied classes would explain
    as well. Diffusion: modulated layers. Vision: patches cut by a convolution of images, and a head.
    """
    total = sum(param.numel for param in params)
    hidden = sum(param.numel for param in params if param.role in (Role.ATTENTION, Role.MLP))
    attends = any(param.role is Role.ATTENTION for param in params)
    modulated = sum(param.numel for param in params if param.role is Role.MODULATION)
    tables = [param for param in params if param.role is Role.EMBEDDING and len(param.shape) == 2]
    heads = [param for param in params if param.role is Role.HEAD]
    outer = sum(param.numel for param in (*tables, *heads))
    if not attends or hidden + modulated < TRANSFORMER * (total - outer):
        return None
    if modulated:
        return "diffusion"
    patches = (param.shape for param in params if param.role is Role.EMBEDDING and len(param.shape) == 4)
    images = any(shape[1] <= FEW_CHANNELS for shape in patches)
    if _of_tokens(tables, heads=heads):
        return None if images and not any(table.aliases for table in tables) else "language"
    return "vision" if images and any(len(head.shape) == 2 for head in heads) else None


def _of_tokens(tables: Sequence[ParamInfo], *, heads: Sequence[ParamInfo]) -> bool:
    """Whether a table has what a head has, as where tokens are read and told."""
    shapes = {head.shape for head in heads}
    return any(table.shape in shapes or table.aliases for table in tables)


def nearest_family(params: Sequence[ParamInfo], *, task: str | None = None) -> str | None:
    """The measured family nearest to a network of another kind: the task's where that is known, else by what it reads,
    images by convolutions or tokens by a table.

    Convolutions come first, as networks for images have tables, too, of classes. What ends with a convolution to as
    many channels as its first one takes, such as a U-Net, makes images and is nearest to diffusion. Beside
    convolutions over one dimension a table is of tokens where a head has its shape.

    None where neither is seen, as in a perceptron or of parameters without names, and where there are less than two
    hidden matrices, in whose rules recipes differ: a single one is a head.
    """
    outer = (Role.EMBEDDING, Role.HEAD, Role.NORM)
    if sum(param.role not in outer and param.matrix_shape is not None for param in params) < 2:
        return None
    if task is not None:
        return task
    tables = [param for param in params if param.role is Role.EMBEDDING and len(param.shape) == 2]
    heads = [param for param in params if param.role is Role.HEAD and len(param.shape) == 2]
    convs = [param.shape for param in params if param.role is Role.CONV]
    if any(len(shape) > 3 for shape in convs):
        shapes = [p.shape for p in params if p.role in (Role.CONV, Role.EMBEDDING, Role.HEAD) and len(p.shape) > 3]
        return "diffusion" if shapes[0][1] == shapes[-1][0] and not heads else "vision"
    if not tables:
        return "vision" if convs else None
    return "language" if not convs or _of_tokens(tables, heads=heads) else None


# -- the file ---------------------------------------------------------------------------------------------------------


@cache
def families() -> Mapping[str, Family]:
    """Every family of the shipped table, by name."""
    return {name: family_from_plain(name, node) for name, node in measured_table().items()}


def family_from_plain(name: str, node: Mapping[str, Any]) -> Family:
    recipes = [
        MeasuredRecipe(
            recipe=recipe_from_node(held["recipe"]),
            rate=held["rate"],
            value=held["value"],
            sd=held["sd"],
            change=Change(**held["change"]),
            changes_against={other: Change(**change) for other, change in held["against"].items()},
            uniform=held["uniform"],
        )
        for held in node["recipes"]
    ]
    own = ("unit", "reference", "base", "num_params", "size", "steps", "horizon")
    return Family(
        name=name,
        **{key: node[key] for key in own},
        recipes=tuple(sorted(recipes, key=lambda one: one.change.mean)),
        roles={role: {spec: Change(**change) for spec, change in held.items()} for role, held in node["roles"].items()},
        weights={name: Change(**held) for name, held in node["weights"].items()},
    )
