"""The decision core stays light, and the rules it is tested with are the real ones."""

from collections.abc import Callable
from subprocess import CompletedProcess

from baoc.catalogue import NATIVE
from baoc.rules import rule_infos
from tests.support.decision import RULES

CORE = "blocks catalogue cost risk candidates frontier allocation types errors units"


def test_it_imports_neither_torch_nor_scipy(run_python: Callable[..., CompletedProcess[str]]):
    imports = "\n".join(f"import baoc.{module}" for module in CORE.split())
    done = run_python(f"{imports}\nimport sys\nprint(sorted({{'torch', 'scipy', 'lightning'}} & set(sys.modules)))")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


def test_the_rules_of_these_tests_have_the_tags_of_the_real_ones():
    real = rule_infos()
    assert set(real) == set(RULES)
    for name, info in RULES.items():
        tags = [(s.kind, s.layout, s.level, s.axis, s.of_squares) for s in real[name].states]
        assert tags == [(s.kind, s.layout, s.level, s.axis, s.of_squares) for s in info.states], name
        for field in ("counts_steps", "matched", "needs_matrix", "hidden_only", "scaling"):
            assert getattr(real[name], field) == getattr(info, field), f"{name}.{field}"


def test_every_row_of_the_catalogue_has_a_rule():
    assert {spec.rule for spec in NATIVE.values()} <= set(rule_infos())
