"""Decisions that are kept: taken over by the same run, made anew by any other, and by whatever is not whole."""

import errno
import json
import linecache
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from baoc.cache import CACHE_VARIABLE, read_private, write_private
from baoc.config.schema import ModelConfig, RunConfig
from baoc.core.budgets import parse_budget
from baoc.profiling import describe
from baoc.training import decision_cache
from baoc.training.decision_cache import (
    Entry,
    Least,
    key_of,
    least_key,
    least_key_of_step,
    load_decision,
    load_least,
    path_of,
    store_decision,
)
from baoc.types import LatencyTable
from tests.support.planners import footprint, option
from tests.support.training_runs import config

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def entry(**changes: Any) -> Entry:
    chosen = option(8, rate=100.0, risk=0.1)
    table = LatencyTable(device="cpu", fixed_s={"adamw": 1e-6}, per_element_s={"adamw": 1e-9}, assumed=("adamw",))
    made = Entry(
        chosen=replace(chosen, chosen=True, tried=True),
        options=(replace(chosen, chosen=True, tried=True), option(4, rate=float("nan"), risk=None)),
        footprint=footprint(8),
        latency=table,
        run_s=float("inf"),
    )
    return replace(made, **changes)


def key(
    asked: RunConfig | None = None, *, network: nn.Module | None = None, batch: Any = None, budget: str = "8gb"
) -> dict[str, Any]:
    given = {"batches": (torch.ones(4, 3) if batch is None else batch, None), "budget": parse_budget(budget)}
    return key_of(asked or config(), network=network or nn.Linear(3, 3), device=CPU, **given)


def test_what_is_kept_comes_back_as_it_was():
    made = entry()
    store_decision(key(), made)
    assert repr(load_decision(key())) == repr(made), "as text: what is not a number is not equal to itself"
    store_decision(key(), entry(run_s=7.0))
    again = load_decision(key())
    assert again is not None and again.run_s == 7.0
    assert key(budget="5505024000b") == key(budget="5250mb"), "a refusal's bytes, by whatever name they are given"


@pytest.mark.parametrize(
    "other",
    [
        {"network": nn.Linear(3, 4)},
        {"network": nn.Linear(3, 3, dtype=torch.bfloat16)},
        {"network": nn.Linear(3, 3).requires_grad_(False)},
        {"network": nn.Sequential(nn.Linear(3, 3))},
        {"network": nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1))},
        {"batch": torch.ones(5, 3)},
        {"batch": torch.ones(4, 3, dtype=torch.int64)},
        {"batch": {"x": torch.ones(4, 3)}},
        {"budget": "7gb"},
        {"asked": config(batch_size=64)},
        {"asked": config(objective="balanced")},
        {"asked": config(model=ModelConfig(compile=True))},
        {"asked": config(micro_batch=4)},
        {"asked": replace(config(), trainer=replace(config().trainer, gradient_clip_val=0.5))},
        {"asked": replace(config(), trainer=replace(config().trainer, precision="bf16-mixed"))},
    ],
    ids=str,
)
def test_for_anything_else_there_is_none(other: dict[str, Any]):
    store_decision(key(), entry())
    assert load_decision(key(**other)) is None and load_decision(key()) is not None


@pytest.mark.parametrize("name", ["source_hash", "package_versions", "timing_key"])
def test_nor_for_other_code_versions_or_machines(name: str, monkeypatch: pytest.MonkeyPatch):
    store_decision(key(), entry())
    value = "other" if name == "source_hash" else {"torch": "0.0"}
    monkeypatch.setattr(decision_cache, name, lambda *_: value)
    assert load_decision(key()) is None


@pytest.mark.parametrize("door", ["a setting", "an object"])
def test_nor_for_own_code_that_was_edited(door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same layers and parameters, another forward pass: of a function that a setting names, or of a given class."""
    file = tmp_path / "a_net.py"
    file.write_text("from torch import nn\n\nclass Net(nn.Linear):\n    pass\n\ndef build():\n    return Net(3, 3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    given: dict[str, Any] = {"asked": config(model=ModelConfig(name=f"{file}:build"))}
    if door == "an object":
        given = {"asked": config(model=ModelConfig(name="Net")), "network": import_module("a_net").build()}
    store_decision(key(**given), entry())
    assert load_decision(key(**given)) is not None
    file.write_text(file.read_text().replace("pass", "forward = nn.Linear.__call__"))
    assert load_decision(key(**given)) is None
    sys.modules.pop("a_net", None)


def test_nor_under_variables_that_steer_kernels(monkeypatch: pytest.MonkeyPatch):
    store_decision(key(), entry())
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert load_decision(key()) is None


def test_nor_for_one_of_several_ranks(monkeypatch: pytest.MonkeyPatch):
    store_decision(key(), entry())
    monkeypatch.setattr(decision_cache, "ranks", lambda: SimpleNamespace(size=2))
    assert load_decision(key()) is None


def test_what_a_run_is_called_and_how_long_it_is_does_not_matter():
    store_decision(key(), entry())
    longer = replace(config(), trainer=replace(config().trainer, max_steps=9999), name="other", seed=5)
    assert load_decision(key(longer)) is not None


def named(**changes: Any) -> Least:
    return replace(Least(num_bytes=7 * 2**30, footprint=footprint(8), recomputed=2, entry=entry(run_s=7.0)), **changes)


def key_of_step(network: nn.Module | None = None, *, inputs: Any = (4, 3), budget: str = "8gb", settings: Any = "of 1"):
    network = network or nn.Linear(3, 3)
    given = {"settings": settings, "budget": parse_budget(budget), "device": CPU}
    return least_key_of_step(inputs, network=network, infos=describe(network), **given)


def with_buffer() -> nn.Module:
    network = nn.Linear(3, 3)
    network.register_buffer("mask", torch.ones(3))
    return network


@pytest.mark.parametrize("made", [named(), named(entry=None)])
def test_what_a_refusal_named_is_there_for_every_budget_of_bytes(made: Least):
    store_decision(least_key(key()), made)
    assert repr(load_least(least_key(key(budget="1gb")))) == repr(made) and load_decision(key()) is None
    assert load_least(least_key(key(budget="state_25"))) is None and load_least(key_of_step()) is None
    store_decision(key_of_step(), made)
    assert repr(load_least(key_of_step(budget="1gb"))) == repr(made)


@pytest.mark.parametrize(
    "other",
    [
        {"network": nn.Linear(3, 4)},
        {"network": nn.Linear(3, 3, dtype=torch.bfloat16)},
        {"network": nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1))},
        {"network": nn.Linear(3, 3).requires_grad_(False)},
        {"network": nn.Linear(3, 3).eval()},
        {"network": with_buffer()},
        {"inputs": (5, 3)},
        {"budget": "state_25"},
        {"settings": "of 2"},
    ],
    ids=str,
)
def test_what_was_named_of_a_step_is_there_for_no_other_step(other: dict[str, Any]):
    store_decision(key_of_step(), named())
    assert load_least(key_of_step(**other)) is None and load_least(key_of_step()) is not None
    with torch.autocast("cpu"):
        assert load_least(key_of_step()) is None


def test_a_script_that_asks_for_what_was_named_is_the_same_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It has the budget beside its classes, and is edited to ask for another."""
    file = tmp_path / "a_script.py"
    monkeypatch.syspath_prepend(tmp_path)

    def after(budget: str, forward: str) -> dict[str, Any]:
        file.write_text(f"from torch import nn\n\nclass Net(nn.Linear):\n    forward = {forward}\n\n{budget}\n")
        sys.modules.pop("a_script", None)
        linecache.clearcache()
        made = import_module("a_script").Net
        monkeypatch.setitem(sys.modules, "__main__", sys.modules["a_script"])
        made.__module__ = "__main__"
        return key_of_step(made(3, 3))["code"]

    first = after("BUDGET = 1", "nn.Linear.forward")
    assert len(first) == 1 and after("BUDGET = 234", "nn.Linear.forward") == first
    assert after("BUDGET = 1", "nn.Linear.__call__") != first
    with pytest.raises(SyntaxError):
        after("BUDGET =", "nn.Linear.forward")
    made = sys.modules["__main__"].Net
    assert key_of_step(made(3, 3))["code"] == {}, "a script that is half edited while it runs"


def torn(path: Path) -> None:
    path.write_text(path.read_text()[: path.stat().st_size // 2])


def changed(path: Path) -> None:
    path.write_text(path.read_text().replace('"micro_batch": 8', '"micro_batch": 4'))


def of_another_key(path: Path) -> None:
    store_decision(key(budget="7gb"), entry())
    path.write_text(path_of(key(budget="7gb")).read_text())


def of_an_older_form(path: Path) -> None:
    body = json.loads(path.read_text())["body"]
    del body["footprint"]["intervals"]
    path.write_text(json.dumps({"digest": decision_cache.json_sha256(body), "body": body}))


def no_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")


def for_others_to_write(path: Path) -> None:
    path.chmod(0o666)


def in_a_folder_of_others(path: Path) -> None:
    path.parent.chmod(0o777)


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize(
    "damage",
    [torn, changed, of_another_key, of_an_older_form, no_text, for_others_to_write, in_a_folder_of_others, linked],
)
def test_what_is_not_whole_or_not_ones_own_is_none_and_is_written_anew(damage: Any, own_cache: Path):
    store_decision(key(), entry())
    damage(path_of(key()))
    assert load_decision(key()) is None
    own_cache.chmod(0o700)
    store_decision(key(), entry())
    assert load_decision(key()) is not None
    store_decision(key_of_step(), named())
    damage(path_of(key_of_step()))
    assert load_least(key_of_step()) is None


def test_several_processes_at_once_leave_whole_ones(own_cache: Path):
    """Each replaces the file in one rename: whoever reads meanwhile has one or the other."""
    asked = key()
    store_decision(asked, entry())

    def work(number: int) -> bool:
        store_decision(asked, entry(run_s=float(number)))
        return load_decision(asked) is not None

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(40)))
    assert [path.name for path in own_cache.iterdir()] == [path_of(asked).name]


def test_only_the_newest_are_kept(own_cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decision_cache, "MAX_ENTRIES", 2)
    for age, budget in enumerate(("1gb", "2gb", "3gb")):
        store_decision(key(budget=budget), entry())
        os.utime(path_of(key(budget=budget)), (age, age))
    store_decision(key(), entry())
    left = [budget for budget in ("1gb", "2gb", "3gb", "8gb") if path_of(key(budget=budget)).exists()]
    assert left == ["3gb", "8gb"]


def test_a_folder_that_cannot_be_written_keeps_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as during:
        during.setattr("os.replace", full)
        write_private(tmp_path / "decision", "text")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    write_private(tmp_path / "file" / "below", "text")
    assert read_private(tmp_path / "file" / "below") is None


def test_a_cache_folder_that_the_user_set_and_cannot_be_written_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"
    write_private(folder / "a", "text")
    assert not caplog.records, "nobody has asked for this folder"
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    for name in "ab":
        write_private(folder / name, "text")
    text = f"${CACHE_VARIABLE}={folder} cannot be written (Not a directory), so nothing is kept there"
    assert caplog.text.count(text) == 1
