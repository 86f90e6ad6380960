"""The shape of the code: a docstring in each file, no machine's paths. Complexity is ruff's to limit."""

import ast
import re

from tests.support.paths import ROOT

SOURCES = {
    str(file.relative_to(ROOT)): file.read_text()
    for file in (ROOT / "run.py", *(file for folder in ("baoc", "tests") for file in (ROOT / folder).rglob("*.py")))
}


def test_each_file_says_what_it_is_for():
    begins = re.compile(r'(?:#.*\n|\s)*"""\S')  # with its docstring
    assert [name for name, text in SOURCES.items() if not begins.match(text)] == []


def test_no_file_names_a_path_of_one_machine():
    kept = [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), *(ROOT / "conf").rglob("*.yaml"), *ROOT.glob("experiments/*")]
    kept += [*(ROOT / "docs").glob("*.md")]
    texts = {
        **SOURCES,
        **{str(file.relative_to(ROOT)): file.read_text() for file in kept if file.is_file() and file.name[0] != "."},
    }
    pattern = re.compile(r"/(?:home|Users|root|work)/\w")
    assert [name for name, text in texts.items() if pattern.search(text)] == []


def test_no_test_module_imports_another():
    """What several test modules need is in tests/support; scripts in strings, which other processes run, count too."""
    pattern = re.compile(r"(?:from|import) (?:tests\.(?!support\.)|tests import|\.+\w* import|test_\w)")
    assert [name for name, text in SOURCES.items() if name.startswith("tests/") and pattern.search(text)] == []


# Private names of torch, Triton, Lightning, Optuna, SQLAlchemy, torchmetrics, ctypes: there is no public way.
OF_OTHERS = {
    "_backend", "_C", "_cdata", "_get_current_dispatch_mode", "_get_np_dtype", "_is_hf_initialized",
    "_len_torch_dispatch_stack", "_local_tensor", "_obj", "_patch_lang", "_post_accumulate_grad_hooks", "_setup_model",
    "_storage", "_trial_id", "_update_count", "_version",
}  # fmt: skip


def private_names(tree: ast.Module) -> set[str]:
    """Private names that a module takes from baoc, from objects other than its own, or replaces by their names."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("baoc", "hydra_plugins"):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            names = [arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            found |= {name.rsplit(".", 1)[-1] for name in names}
    return {name for name in found - OF_OTHERS if re.match(r"_[^_]", name)}


def test_tests_use_no_private_names():
    """What is private may be rewritten without a test of it: tests hold what callers see, or functions of values."""
    found = {name: private_names(ast.parse(text)) for name, text in SOURCES.items() if name.startswith("tests/")}
    assert {name: names for name, names in found.items() if names} == {}
    example = "from baoc.a import _b\nc._d\nx.setattr(c, '_e', 1)\nx.setattr('baoc.a._f', 1)"
    assert private_names(ast.parse(example)) == {"_b", "_d", "_e", "_f"}
