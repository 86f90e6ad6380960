"""The decision core stays light, and the rules it is tested with are the real ones."""

from collections.abc import Callable
from subprocess import CompletedProcess

from baoc.core.catalogue import NATIVE
from baoc.core.rule_tags import RULE_INFOS
from tests.decision import RULES

CORE = ("baoc.core", "baoc.planning", "baoc.frontier.pareto", "baoc.types", "baoc.errors", "baoc.units")
IMPORTS = """
import sys
from importlib import import_module
from pkgutil import walk_packages
for name in {core}:
    package = import_module(name)
    for module in walk_packages(getattr(package, "__path__", ()), name + "."):
        import_module(module.name)
print(sorted({{"torch", "scipy", "lightning"}} & set(sys.modules)))
"""


def test_it_imports_neither_torch_nor_scipy(run_python: Callable[..., CompletedProcess[str]]):
    done = run_python(IMPORTS.format(core=CORE))
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


def test_the_rules_of_these_tests_have_the_tags_of_the_real_ones():
    real = RULE_INFOS
    assert set(real) == set(RULES)
    for name, info in RULES.items():
        tags = [(s.kind, s.layout, s.level, s.axis, s.of_squares) for s in real[name].states]
        assert tags == [(s.kind, s.layout, s.level, s.axis, s.of_squares) for s in info.states], name
        for field in ("counts_steps", "matched", "needs_matrix", "hidden_only", "scaling"):
            assert getattr(real[name], field) == getattr(info, field), f"{name}.{field}"


def test_every_row_of_the_catalogue_has_a_rule():
    assert {spec.rule for spec in NATIVE.values()} <= set(RULE_INFOS)
