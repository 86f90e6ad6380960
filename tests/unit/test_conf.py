"""Every option of conf/ and every experiment composes into a RunConfig, and conf/ says what the code says."""

from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from baoc.allocation import ALLOCATORS
from baoc.budgets import PRESETS, parse_budget
from baoc.config import assets
from baoc.config.compose import compose
from baoc.config.from_hydra import from_hydra
from baoc.config.nodes import job_folder
from baoc.config.schema import RunConfig
from baoc.config.trainer_arguments import TrainerConfig
from baoc.data import DATASETS
from baoc.errors import BadInputError
from baoc.models import MODELS
from baoc.risk import RISKS, SEVERITY
from baoc.units import MIB

OVERLAYS = ("experiments", "sweeps", "debug")  # change other groups, so each of their options is composed alone
GROUPS = sorted({folder.name for folder in assets.conf().iterdir() if folder.is_dir()} - {"hydra", *OVERLAYS})
# Row n takes the nth option of every group, starting anew in shorter ones: every option once, in few compositions.
ROWS = [
    {group: options[row % len(options)] for group in GROUPS if (options := list(assets.options(group)))}
    for row in range(max(len(assets.options(group)) for group in GROUPS))
]


def run_of(*overrides: str) -> RunConfig:
    return from_hydra(compose(overrides))


def read(group: str, option: str) -> dict:
    return yaml.safe_load(assets.options(group)[option].read_text())


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_each_option_composes_into_a_run(row: dict[str, str]):
    run = run_of(*(f"{group}={option}" for group, option in row.items()))
    for group, option in row.items():
        assert getattr(getattr(run, group), "name", option) == option, "an option is called as it names itself"
    assert (run.blocks.by, run.reallocation.mode) == (row["blocks"], row["reallocation"])
    assert run.budget == PRESETS[row["budget"]]


@pytest.mark.parametrize(("group", "option"), [(group, o) for group in OVERLAYS for o in assets.options(group)])
def test_each_experiment_sweep_and_debug_option_composes_into_a_run(group: str, option: str):
    assert run_of(f"{group}={option}").name == option


def test_each_option_has_a_line_for_list():
    for group in (*GROUPS, *OVERLAYS):
        for option, file in assets.options(group).items():
            assert assets.description(file), f"{group}={option}"


def test_the_default_is_the_command_of_the_readme():
    run = run_of()
    assert run == run_of("model=vit", "budget=8gb")
    assert (run.name, run.task.name, run.trainer.max_steps, run.trainer.gradient_clip_val) == (
        "vit_8gb",
        "vision",
        400,
        1,
    )


def test_defaults_of_the_schema_are_those_of_conf():
    composed, plain = run_of("budget=unlimited"), RunConfig()
    for item in fields(RunConfig):
        if item.name not in ("name", "trainer", "risk", "model"):
            assert getattr(composed, item.name) == getattr(plain, item.name), item.name
    assert composed.risk.name == plain.risk.name
    assert (composed.model.name, composed.model.size) == (plain.model.name, plain.model.size)


def test_budgets_of_conf_are_the_presets():
    assert set(assets.options("budget")) == set(PRESETS)
    for name, preset in PRESETS.items():
        assert parse_budget(read("budget", name)) == preset


@pytest.mark.parametrize(
    ("group", "registry"), [("allocator", ALLOCATORS), ("risk", RISKS), ("model", MODELS), ("dataset", DATASETS)]
)
def test_options_of_conf_are_those_of_the_registry(group: str, registry):
    assert set(assets.options(group)) == set(registry)


def test_conf_offers_every_option_of_a_model_and_every_weight_of_a_risk():
    for name, model in MODELS.items():
        given = read("model", name)
        assert {key: given[key] for key in model.options} == model.options
        assert given["task"] == model.task
    for name in RISKS:
        assert set(SEVERITY) <= set(read("risk", name)["weights"]), "every risk falls back to the prior's terms"


def test_conf_offers_every_trainer_argument():
    assert list(read("trainer", "default")) == [item.name for item in fields(TrainerConfig)]


@pytest.mark.parametrize("text", ["7.5gb", "300mb", "state_33", "1tb"])
def test_any_size_is_an_option_of_budget(text: str):
    assert run_of(f"budget={text}").budget == parse_budget(text)


def test_limits_stand_beside_a_preset():
    assert run_of("budget=8gb", "budget.step_time=1.2").budget.step_time == 1.2
    smaller = run_of("budget=8gb", "budget.memory=300mb")
    assert (smaller.budget.name, smaller.budget.memory_bytes, smaller.name) == ("300mb", 300 * MIB, "vit_8gb")


def test_a_debug_group_comes_after_an_experiment():
    run = run_of("experiments=digits_state_25", "debug=fast_dev")
    assert (run.budget.name, run.trainer.max_steps) == ("state_25", 3)


def test_an_experiment_may_build_on_another_and_name_a_size(tmp_path: Path, monkeypatch):
    (tmp_path / "base.yaml").write_text("# @package _global_\n# b\ndefaults: [override /budget: 301mb]\nseed: 5\n")
    (tmp_path / "child.yaml").write_text("# @package _global_\n# c\ndefaults: [base]\nname: child\n")
    files = {file.stem: file for file in tmp_path.glob("*.yaml")}
    of_conf = assets.options
    monkeypatch.setattr(assets, "options", lambda group: files if group == "experiments" else of_conf(group))
    run = run_of("experiments=child")
    assert (run.name, run.seed, run.budget.memory_bytes) == ("child", 5, 301 * MIB)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [1", r"experiments/broken.yaml is no valid YAML: "),
        ("- 1", r"experiments/broken.yaml must hold keys and values"),
        ("defaults: [override /budget: 8gbb]", r"cannot read budget=8gbb"),
    ],
)
def test_a_broken_experiment_is_named(content: str, message: str, tmp_path: Path, monkeypatch):
    file = tmp_path / "experiments" / "broken.yaml"
    file.parent.mkdir()
    file.write_text(content)
    monkeypatch.setattr(assets, "options", lambda group: {"broken": file} if group == "experiments" else {})
    with pytest.raises(BadInputError, match=message):
        run_of()


def test_folders_of_jobs_are_safe_names():
    assert job_folder(0, "budget=4gb,seed=1") == "0_budget=4gb,seed=1"
    assert job_folder(2, "dataset.path=/a b/c") == "2_dataset.path=-a-b-c"
    assert job_folder(1, "") == "1"
    assert len(job_folder(3, "x" * 300)) < 100
