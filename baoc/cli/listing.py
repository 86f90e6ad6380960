"""`--list NAME`: the available names with one-line descriptions, in plain columns."""

from collections.abc import Callable
from importlib import import_module

from baoc.config import assets
from baoc.core import own_code
from baoc.core.budgets import PRESETS
from baoc.errors import BadInputError, did_you_mean
from baoc.types import Budget
from baoc.units import format_bytes

Rows = list[tuple[str, str]]


def list_lines(name: str) -> list[str]:
    """The lines that `--list name` prints. Raises BadInputError for an unknown list."""
    if name not in LISTS:
        hint = did_you_mean(name, LISTS)
        raise BadInputError(f"--list {name}: there is no such list{hint}\nallowed: {', '.join(LISTS)}")
    rows = LISTS[name]() or [("(none yet)", "")]
    width = max((len(row[0]) for row in rows), default=0)
    return [f"{key:<{width}}  {text}".rstrip() for key, text in rows]


def _options(group: str) -> Callable[[], Rows]:
    return lambda: [(option, assets.description(file)) for option, file in assets.option_files(group).items()]


def _registry(name: str, *, group: str = "") -> Callable[[], Rows]:
    """Rows of the registry `module.NAME`, which is imported when it is listed. `group`: the group of conf/ to which
    users can add their own code; rows for it follow."""
    module, _, attribute = name.rpartition(".")

    def rows() -> Rows:
        registry = getattr(import_module(module), attribute)
        return [(name, entry.description) for name, entry in registry.items()] + (_own_code(group) if group else [])

    return rows


def _own_code(group: str) -> Rows:
    """Entry points of installed packages, and how the user's own code is named."""
    declared = own_code.entry_points_of(f"baoc.{group}s")
    rows = [(name, f"{point.value}, declared by an installed package") for name, point in declared.items()]
    how = f"your own: {group}=FILE.py:NAME or {group}=package.module.NAME (docs/own-code.md)"
    return [*rows, ("FILE.py:NAME", how)]


def _budgets() -> Rows:
    files = assets.option_files("budget")
    rows = [
        (name, assets.description(files[name]) if name in files else _in_words(budget))
        for name, budget in PRESETS.items()
    ]
    return [*rows, ("SIZE", "any size, such as 7.5gb or 300mb"), ("state_N", "N % of fp32 AdamW's optimizer state")]


def _in_words(budget: Budget) -> str:
    if budget.memory_bytes is not None:
        return f"{format_bytes(budget.memory_bytes)} of device memory"
    return f"Optimizer state of at most {100 * (budget.state_fraction or 0):g} % of fp32 AdamW's"


def _models() -> Rows:
    from baoc.models import MODELS

    rows: Rows = []
    for model in MODELS.values():
        rows.append((model.name, model.description))
        rows += [(f"  model.size={size.name}", size.description) for size in model.sizes.values()]
    return rows + _own_code("model")


def _specs() -> Rows:
    """Specs with native weights and their state bytes per parameter, then the suffixes for weights and placement."""
    from baoc.core.catalogue import NATIVE, STREAMED, STREAMED_TEXT, WEIGHTS
    from baoc.core.rule_tags import RULE_INFOS
    from baoc.planning.cost import bytes_per_parameter

    rows = [
        (name, f"{bytes_per_parameter(spec, rule=RULE_INFOS[spec.rule])[0]:.2f} B  {spec.description}")
        for name, spec in NATIVE.items()
    ]
    rows += [(f"+{name}", row.description) for name, row in WEIGHTS.items() if row.param_bytes is not None]
    return [*rows, (STREAMED, STREAMED_TEXT)]


def _recipes() -> Rows:
    """Recipes with their state on Llama 130M as a share of fp32 AdamW's."""
    from baoc.core.recipes import RECIPES, measured_recipes, recipe_node

    rows = [(name, f"{row.share:6.1%}  {row.description} ({row.source})") for name, row in RECIPES.items()]
    for name, recipe in measured_recipes().items():
        if name not in RECIPES:
            node = recipe_node(recipe)
            contents = [f"{role} {spec}" for role, spec in recipe.specs.items()]
            contents += [f"{key}.{rule} {value}" for key in ("lr", "betas") for rule, value in node[key].items()]
            rows.append((name, f"        of the measured table: {', '.join(contents)}"))
    declared = own_code.entry_points_of("baoc.recipes")
    others = [(name, f"        {point.value}, of an installed package") for name, point in declared.items()]
    return [*rows, *others, ("FILE.yaml", "a recipe of your own: docs/recipes.md")]


def _risks() -> Rows:
    from baoc.planning.risk import RISKS

    presets = [row for row in _options("risk")() if row[0] not in RISKS]  # the same risk models with other weights
    return [*((name, row.description) for name, row in RISKS.items()), *presets]


LISTS: dict[str, Callable[[], Rows]] = {
    "specs": _specs,
    "models": _models,
    "datasets": _registry("baoc.data.DATASETS", group="dataset"),
    "tasks": _registry("baoc.tasks.TASKS", group="task"),
    "budgets": _budgets,
    "experiments": _options("experiments"),
    "sweeps": _options("sweeps"),
    "allocators": _registry("baoc.planning.allocators.ALLOCATORS"),
    "recipes": _recipes,
    "risks": _risks,
    "rules": _registry("baoc.core.rule_tags.RULE_INFOS"),
    "storages": _registry("baoc.core.catalogue.STORAGES"),
    "lists": lambda: [(name, "") for name in LISTS],
}
