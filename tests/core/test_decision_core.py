"""The decision core stays light."""

from collections.abc import Callable
from subprocess import CompletedProcess

from baoc.core.catalogue import NATIVE
from baoc.core.rule_tags import RULE_INFOS

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


def test_every_row_of_the_catalogue_has_a_rule():
    assert {spec.rule for spec in NATIVE.values()} <= set(RULE_INFOS)
