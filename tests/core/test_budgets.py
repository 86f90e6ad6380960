"""Every spelling of a budget, and what is said of those that are none."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baoc.core.budgets import PRESETS, parse_budget, resolve_auto
from baoc.errors import BadInputError
from baoc.types import Budget
from baoc.units import GIB, MIB


@pytest.mark.parametrize(
    ("spelling", "name", "memory_bytes"),
    [
        ("8gb", "8gb", 8 * GIB),
        (" 7.5 GB ", "7.5gb", 7 * GIB + GIB // 2),
        ("300mb", "300mb", 300 * MIB),
        ("2048mib", "2048mib", 2 * GIB),
        (8 * GIB, "8gb", 8 * GIB),
        (123_456_789, "123456789b", 123_456_789),
        ("9504974438", "9504974438b", 9_504_974_438),
        (" 8589934592 ", "8gb", 8 * GIB),
        (np.int64(9_504_974_438), "9504974438b", 9_504_974_438),
        ({"memory": np.uint32(300 * MIB)}, "300mb", 300 * MIB),
        ({"memory": "8gb"}, "8gb", 8 * GIB),
        ({"memory": "9504974438"}, "9504974438b", 9_504_974_438),
        ({"memory": 300 * MIB}, "300mb", 300 * MIB),
        ({"memory_bytes": 300 * MIB, "name": None}, "300mb", 300 * MIB),
        ({"name": "laptop", "memory": "8gb"}, "laptop", 8 * GIB),
        (Budget(name="laptop", memory_bytes=8 * GIB), "laptop", 8 * GIB),
    ],
)
def test_memory_in_every_spelling(spelling, name: str, memory_bytes: int):
    budget = parse_budget(spelling)
    assert (budget.name, budget.memory_bytes, budget.kind) == (name, memory_bytes, "memory")


@pytest.mark.parametrize(
    ("spelling", "name", "fraction"),
    [
        ("state_25", "state_25", 0.25),
        ("STATE_12.5", "state_12.5", 0.125),
        (0.1, "state_10", 0.1),
        (1.0, "state_100", 1),
        ("0.25", "state_25", 0.25),
        (" .125 ", "state_12.5", 0.125),
        (np.float32(0.25), "state_25", 0.25),
        ({"state_fraction": np.float64(0.5)}, "state_50", 0.5),
    ],
)
def test_state_fraction_in_every_spelling(spelling, name: str, fraction: float):
    budget = parse_budget(spelling)
    assert (budget.name, budget.state_fraction, budget.kind) == (name, fraction, "state_fraction")


@pytest.mark.parametrize(
    ("spelling", "said"),
    [
        ("state_0.25", "budget=state_0.25 allows 0.25 % of AdamW's state: a share of 0.25 is state_25"),
        (" STATE_0.125", "allows 0.125 % of AdamW's state: a share of 0.125 is state_12.5"),
        ("state_1", ""),
        ("state_12.5", ""),
        ("0.25", ""),
        (0.0025, ""),
    ],
)
def test_a_percentage_that_looks_like_a_share_is_told(spelling, said: str, caplog: pytest.LogCaptureFixture):
    assert parse_budget(spelling).kind == "state_fraction"
    assert said in caplog.text and bool(said) == bool(caplog.text)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_taken_by_name_and_by_itself(name: str):
    assert parse_budget(name) == parse_budget(name.upper()) == parse_budget(PRESETS[name]) == PRESETS[name]


def test_host_memory_stands_beside_any_limit():
    for other in ({"memory": "8gb"}, {"state_fraction": 0.25}, {"name": "unlimited"}):
        budget = parse_budget({**other, "host_memory": "1.5gb"})
        assert budget.host_memory_bytes == 3 * GIB // 2 and budget == replace(
            parse_budget(other), host_memory_bytes=3 * GIB // 2
        )
    assert parse_budget({"memory": "8gb", "host_memory": 4096}).host_memory_bytes == 4096
    assert parse_budget({"memory": "8gb", "host_memory": None}).host_memory_bytes is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("much", r"cannot read 'much' as a memory size"),
        (1.5, r"budget.host_memory=1.5 is no size: write 8gb"),
        (0, r"budget.host_memory=0 holds nothing: give a positive size, such as 16gb, or null for no limit"),
    ],
)
def test_host_memory_that_is_no_size_is_refused(given, message: str):
    with pytest.raises(BadInputError, match=message):
        parse_budget({"memory": "8gb", "host_memory": given})


def test_a_step_time_stands_beside_a_memory_limit_and_alone():
    both = parse_budget({"name": "8gb", "memory": "8gb", "step_time": 1.2})
    assert both == Budget(name="8gb", memory_bytes=8 * GIB, step_time=1.2)
    alone = parse_budget({"name": "unlimited", "step_time": 2})
    assert alone == Budget(name="unlimited", step_time=2.0)
    assert parse_budget(Budget(name="fast", step_time=2.0)) == parse_budget({"name": "fast", "step_time": 2})


def test_a_preset_name_never_stays_on_another_limit():
    assert parse_budget({"name": "8gb", "memory": "6gb"}).name == "6gb"
    assert parse_budget({"name": "state_25", "state_fraction": 0.3}).name == "state_30"
    assert parse_budget({"name": "auto", "memory": None}).name == "auto"
    assert parse_budget({"name": "8gb", "memory": None}).name == "unlimited"


def test_auto_becomes_what_is_free_and_nothing_else_changes():
    auto = resolve_auto(parse_budget("auto"), free_bytes=5 * GIB)
    assert (auto.name, auto.memory_bytes) == ("auto", 5 * GIB)
    for name in ("8gb", "state_25", "unlimited"):
        assert resolve_auto(parse_budget(name), free_bytes=5 * GIB) == parse_budget(name)
    assert resolve_auto(auto, free_bytes=GIB) == auto, "a limit that is known stays"


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("8gbb", r"cannot read budget=8gbb: it takes a preset \(2gb, 4gb.*7.5gb or 300mb.*did you mean 8gb\?"),
        ("lots", r"cannot read budget=lots: it takes a preset"),
        ("-1gb", r"cannot read budget=-1gb"),
        ("8", r"cannot read budget=8: .*; did you mean 8gb or state_8\?"),
        ("300000", r"cannot read budget=300000: .*; did you mean 300000b\?"),
        ("2000000000.0", r"did you mean 2000000000b\?"),
        ("sate_15", r"did you mean state_15\?"),
        ("12.5gbytes", r"did you mean 12.5gb\?"),
        ("sate_500", r"for N % of AdamW's state$"),
        ("", r"cannot read budget=: "),
        ("0gb", r"'0gb' holds nothing: give a positive one"),
        ("state50", r"did you mean state_50\?"),
        ("state_0", r"a state fraction of 0 is not allowed: .*\(0, 1\]"),
        ("state_150", r"a state fraction of 1.5 is not allowed"),
        ("state_100.0001", r"a state fraction of 1.000001 is not allowed"),
        ("9" * 5000, r"a memory limit of 2\^63 bytes or more is more than any machine has"),
        ({"memory": "9" * 5000}, r"a memory limit of 2\^63 bytes or more"),
        ({"name": "8gb"}, r"budget.name=8gb is a name and limits nothing: give budget=8gb, or memory or state"),
        ({"name": "state_25", "step_time": 1.2}, r"budget.name=state_25 is a name and limits nothing"),
        ("0.0", r"a state fraction of 0 is not allowed"),
        ("7.5", r"cannot read budget=7.5: .*; did you mean 7.5gb or state_7.5\?"),
        (2.0, r"a state fraction of 2 is not allowed: .*with a unit \(8gb\)"),
        (float("nan"), r"a state fraction of nan is not allowed"),
        (0, r"a memory budget of 0 bytes holds nothing"),
        (-5, r"a memory budget of -5 bytes holds nothing"),
        (True, r"cannot read budget=True"),
        (None, r"cannot read budget=None"),
        (["8gb"], r"cannot read budget=\['8gb'\]"),
        ({"memry": "8gb"}, r"budget has no key 'memry'; did you mean memory\? It takes name, memory"),
        ({"qqq": 1}, r"budget has no key 'qqq'\. It takes name, memory"),
        ({"memory": "8gbb"}, r"cannot read '8gbb' as a memory size"),
        ({"memory": 7.5}, r"budget.memory=7.5 is no size: write 8gb"),
        ({"memory": "8gb", "memory_bytes": 1}, r"are the same limit: give one of them"),
        ({"memory": "8gb", "step_time": "fast"}, r"budget.step_time='fast' is no number"),
        ({"memory": "8gb", "step_time": 0}, r"budget.step_time=0 is not allowed: it is a ratio .* such as 1.2"),
        ({"memory": "8gb", "step_time": float("inf")}, r"budget.step_time=inf is not allowed"),
        ({"memory": "8gb", "state_fraction": 0.5}, r"not both: choose budget=8gb or budget=state_50"),
        (
            {"name": "8gb", "memory": "8gb", "state_fraction": 0.25},
            r"not both \(budget=8gb, given or by default, is the former\): choose budget=8gb or budget=state_25$",
        ),
        (Budget(name="8gb"), r"budget.name=8gb is a name and limits nothing: give budget=8gb, or memory or state"),
        (Budget(name="State_25", step_time=1.2), r"budget.name=State_25 is a name and limits nothing"),
        ({}, r'^the budget sets none of memory, memory_bytes, state_.*, host_memory: set one .*, or give "unlimited"$'),
        ({"name": None, "memory": None}, r"the budget sets none of memory, "),
        (Budget(name=""), r"the budget sets none of memory, "),
        (
            {"name": "laptop"},
            r"budget.name=laptop is a name, and sets none of memory, .*: set one",
        ),
        ({"name": "laptop", "memory": None}, r"budget.name=laptop is a name, and sets none of memory"),
        (Budget(name="laptop"), r"budget.name=laptop is a name, and sets none of memory"),
        (Budget(name="x", memory_bytes=-1), r"a memory budget of -1 bytes holds nothing"),
    ],
)
def test_what_is_no_budget_is_refused_with_what_is_allowed(spelling, message: str):
    with pytest.raises(BadInputError, match=message):
        parse_budget(spelling)


@given(st.integers(min_value=1, max_value=2**50))
def test_whole_bytes_keep_every_byte_and_their_name_reads_back(num_bytes: int):
    budget = parse_budget(num_bytes)
    assert budget.memory_bytes == num_bytes
    assert parse_budget(budget.name).memory_bytes == num_bytes


def test_parsing_needs_neither_torch_nor_hydra(run_python):
    code = "import sys, baoc.core.budgets; print(sorted({'torch', 'hydra', 'omegaconf', 'numpy'} & set(sys.modules)))"
    assert run_python(code).stdout.strip() == "[]"
    assert "baoc.core.budgets" in sys.modules
