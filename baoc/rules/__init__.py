"""The update rules, one file per family; a file that defines `RULES` is found by being here.

To add a rule: write `baoc/rules/<family>.py` with `RULES = (MyRule(RuleInfo(...)),)` and one row in `catalogue.SPECS`.
Its ledger, storage, migration and contract tests follow from the tags in its `RuleInfo`.
"""

from importlib import import_module
from pkgutil import iter_modules

from baoc.rules.base import Direction, Rule, RuleContext, UpdateRule
from baoc.types import RuleInfo

__all__ = ["RULES", "Direction", "Rule", "RuleContext", "UpdateRule", "rule_infos"]


def _discover() -> dict[str, UpdateRule]:
    found: dict[str, UpdateRule] = {}
    for module in iter_modules(__path__):
        for rule in getattr(import_module(f"{__name__}.{module.name}"), "RULES", ()):
            assert rule.info.name not in found, f"two rules are called {rule.info.name}"
            found[rule.info.name] = rule
    return found


RULES: dict[str, UpdateRule] = _discover()


def rule_infos() -> dict[str, RuleInfo]:
    """Name -> what the decision core may know of the rule."""
    return {name: rule.info for name, rule in RULES.items()}
