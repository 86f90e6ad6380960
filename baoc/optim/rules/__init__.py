"""The update rules, one file per family; a file that defines `RULES` is found by being here.

To add a rule: write its tags in `baoc.core.rule_tags`, its row in `baoc.core.catalogue`, and its arithmetic in a file
here with `RULES = (MyRule(RULE_INFOS["my_rule"]),)`. Ledger, storage, migration and contract tests follow.
"""

from importlib import import_module
from pkgutil import iter_modules

from baoc.core.rule_tags import OWN_RULES
from baoc.optim.rules.base import Direction, Rule, RuleContext

__all__ = ["RULES", "Direction", "Rule", "RuleContext"]


def _discover() -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    for module in iter_modules(__path__):
        for rule in getattr(import_module(f"{__name__}.{module.name}"), "RULES", ()):
            assert rule.info.name not in rules, f"two rules are called {rule.info.name}"
            rules[rule.info.name] = rule
    for name, row in OWN_RULES.items():
        own_rules = {rule.info.name: rule for rule in import_module(row.arithmetic).RULES}
        assert name in own_rules, f"{row.arithmetic}.RULES has no rule {name}"
        rules[name] = own_rules[name]
    return rules


RULES: dict[str, Rule] = _discover()
