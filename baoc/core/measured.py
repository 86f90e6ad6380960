"""Measured changes of the final loss by recipes, and by specs in one role, for families of networks.

A family is a kind of network and task: transformers for language, vision and diffusion. The table `measured.json` is
written by `python -m experiments.analysis.fit_measured` from the raw rows of the studies. A change is a difference from
a named recipe, in the unit of the family's loss; below 0 is better. It holds for the size that was measured: a network
goes by the size nearest to its own.
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

AUTO = "auto"  # the family is derived from the network
TRANSFORMER_SHARE = 0.5  # least share of the inner elements in attention, mlp and modulation
MAX_IMAGE_CHANNELS = 4  # a convolution with more input channels does not cut images into patches
# Decades of size beyond the measured network, over which a measured multiple of the learning rate fades to 1.
FADING_DECADES = 2.0
KAPPA = 1.28  # standard deviations that are added to a mean: the one-sided bound at 90 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the final loss: its mean over `n` paired seeds, and the mean's standard deviation. `multiple`: of the
    role's learning rate in the base recipe, at which it was measured. `carried`: the smaller size at which it was
    measured, if it was not at this one; the standard deviation has the error between sizes, too."""

    mean: float
    sd: float
    n: int
    multiple: float = 1.0
    carried: str = ""

    @property
    def half(self) -> float:
        """Half-width of the two-sided 90 % interval."""
        return student_quantile(0.95, degrees=max(self.n - 1, 1)) * self.sd

    def __str__(self) -> str:
        return f"{self.mean:+.4g} +- {self.half:.2g}"

    def bound(self, kappa: float) -> float:
        """An upper bound of the change: mean + kappa sd."""
        return self.mean + kappa * self.sd


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRecipe:
    """A recipe at its own best learning rate.

    Args:
        rate: multiple of fp32 AdamW's learning rate, for all rules.
        value: mean of the final loss.
        sd: its standard deviation over seeds.
        change: of the final loss, against the family's reference.
        changes_against: recipe name -> change against that recipe.
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
    """The measurements of one family at one size.

    Args:
        unit: of the loss.
        reference: the best uniform recipe that was run, from which changes of recipes are measured.
        base: the recipe of which single roles were replaced; None if none were.
        num_params: of the network.
        size: of the network, in words.
        steps: of a run.
        horizon: of a run, in words.
        recipes: the least mean first.
        roles: role -> spec -> change against the base.
        weights: weights format -> change against fp32 weights, under 8-bit Muon.
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
        return next(measured for measured in self.recipes if measured.name == name)

    def ranked(self, kappa: float) -> list[MeasuredRecipe]:
        """Its recipes, the best first, by mean + kappa sd of their change."""
        return sorted(self.recipes, key=lambda row: (row.change.bound(kappa), row.change.mean))


def nearest_size(sizes: Sequence[Family], *, num_params: int) -> Family | None:
    """Of a family's sizes the one nearest to `num_params` by their ratio; of two as near, the smaller."""
    return min(sizes, key=lambda one: (abs(log10(max(num_params, 1) / one.num_params)), one.num_params), default=None)


def faded_rate(rate: float, *, num_params: int, measured: int) -> float:
    """A measured multiple of the learning rate at another network size than the `measured` one.

    It holds up to the measured size and fades to 1 over FADING_DECADES beyond: updates of all rules have AdamW's size,
    so AdamW's own learning rate is the best guess without a measurement.
    """
    decades = log10(max(num_params, 1) / max(measured, 1))
    return rate ** (1 - min(max(decades, 0.0) / FADING_DECADES, 1.0))


def with_rate(recipe: Recipe, rate: float, *, by_role: Mapping[str, float] | None = None) -> Recipe:
    """The recipe with `rate` as the multiple of the learning rate of all its rules, and other multiples `by_role`."""
    by_rule = {SPECS[name].rule: rate for name in recipe.all_specs} if rate != 1 else {}
    return replace(recipe, lr={**by_rule, **recipe.lr, **(by_role or {})})


def family_of(params: Sequence[ParamInfo]) -> str | None:
    """The measured family of a network, by shapes and roles; None if it is no transformer of a measured kind.

    Diffusion: it has modulated layers. Language: an embedding has the head's rows or is tied; with a convolution of
    images too it has to be tied, as the table may be of classes. Vision: a convolution cuts images into patches, and
    there is a head.
    """
    total = sum(param.numel for param in params)
    hidden = sum(param.numel for param in params if param.role in (Role.ATTENTION, Role.MLP))
    attends = any(param.role is Role.ATTENTION for param in params)
    modulated = sum(param.numel for param in params if param.role is Role.MODULATION)
    tables = [param for param in params if param.role is Role.EMBEDDING and len(param.shape) == 2]
    heads = [param for param in params if param.role is Role.HEAD]
    outer = sum(param.numel for param in (*tables, *heads))
    if not attends or hidden + modulated < TRANSFORMER_SHARE * (total - outer):
        return None
    if modulated:
        return "diffusion"
    patches = (param.shape for param in params if param.role is Role.EMBEDDING and len(param.shape) == 4)
    reads_images = any(shape[1] <= MAX_IMAGE_CHANNELS for shape in patches)
    if _of_tokens(tables, heads=heads):
        return None if reads_images and not any(table.aliases for table in tables) else "language"
    return "vision" if reads_images and any(len(head.shape) == 2 for head in heads) else None


def _of_tokens(tables: Sequence[ParamInfo], *, heads: Sequence[ParamInfo]) -> bool:
    """Whether an embedding table has a head's rows, or is tied and no head is beside it, as in networks that read and
    predict tokens: encoder and decoder share a table too. A head of two rows is of two classes, though BERT's table of
    segments has as many."""
    rows = {head.shape[0] for head in heads if head.shape[0] > 2}
    return any(table.shape[0] in rows or (table.aliases and not heads) for table in tables)


def nearest_family(params: Sequence[ParamInfo], *, task: str | None = None) -> str | None:
    """The measured family nearest to a network of another kind.

    That is the family of the `task` if it is known. Else networks with convolutions over images are nearest to vision,
    or to diffusion if the last one puts out as many channels as the first one takes and there is no head, as in a
    U-Net. They are asked first, as networks for images may have tables of classes. Networks with an embedding table are
    nearest to language; beside one-dimensional convolutions or a head only if a head has the table's rows: a
    classifier of texts predicts no tokens.

    None without convolutions and tables, as for a perceptron, and with less than two hidden matrices: recipes differ in
    their rules for these, and a single one is a head.
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
    return "language" if not (convs or heads) or _of_tokens(tables, heads=heads) else None


# -- the file ---------------------------------------------------------------------------------------------------------


@cache
def families() -> Mapping[str, tuple[Family, ...]]:
    """Family -> its measurements, one of each size, the smallest first."""
    nodes = {name: sorted(sizes, key=lambda node: node["num_params"]) for name, sizes in measured_table().items()}
    return {name: tuple(family_from_plain(name, node) for node in sizes) for name, sizes in nodes.items()}


def family_from_plain(name: str, node: Mapping[str, Any]) -> Family:
    """A family at one size from its node of measured.json."""
    recipes = [
        MeasuredRecipe(
            recipe=recipe_from_node(row["recipe"]),
            rate=row["rate"],
            value=row["value"],
            sd=row["sd"],
            change=Change(**row["change"]),
            changes_against={other: Change(**change) for other, change in row["against"].items()},
            uniform=row["uniform"],
        )
        for row in node["recipes"]
    ]
    return Family(
        name=name,
        **{key: node[key] for key in ("unit", "reference", "base", "num_params", "size", "steps", "horizon")},
        recipes=tuple(sorted(recipes, key=lambda measured: measured.change.mean)),
        roles={
            role: {spec: Change(**change) for spec, change in by_spec.items()}
            for role, by_spec in node["roles"].items()
        },
        weights={name: Change(**change) for name, change in node["weights"].items()},
    )
