"""Every option of conf/ and every experiment composes into a RunConfig, and conf/ says what the code says."""

from dataclasses import fields, replace
from pathlib import Path

import cloudpickle
import pytest
import yaml
from hydra.core.singleton import Singleton
from omegaconf import OmegaConf

from baoc.config import assets
from baoc.config.compose import compose
from baoc.config.from_hydra import check_names, from_hydra
from baoc.config.nodes import as_typed, job_folder, option_names, option_values, register, with_option_names
from baoc.config.options import group_keys, registry
from baoc.config.resolve import resolve
from baoc.config.schema import AllocatorConfig, RunConfig
from baoc.config.trainer_arguments import TrainerConfig
from baoc.core.budgets import PRESETS, parse_budget
from baoc.core.yaml_files import read_yaml
from baoc.errors import BadInputError
from baoc.planning.allocators import ALLOCATORS
from baoc.planning.risk import RISKS, SEVERITY
from baoc.units import MIB

OPTIONS = ("task", "model", "dataset")
OVERLAYS = ("experiments", "sweeps", "debug")  # change other groups, so each of their options is composed alone
GROUPS = sorted({folder.name for folder in assets.conf().iterdir() if folder.is_dir()} - {"hydra", *OVERLAYS})
# Row n takes the nth option of every group, starting anew in shorter ones: every option once, in few compositions. The
# model, its task and a data set for it are taken together, each data set with one of the models that it serves.
MODELS, SETS = registry("model"), registry("dataset")
FITTING = [
    {"model": model, "task": MODELS[model].task, "dataset": dataset}
    for at, (dataset, data) in enumerate(SETS.items())
    for fits in [[model for model, row in MODELS.items() if row.task in data.tasks]]
    for model in [fits[at % len(fits)]]
]
MADE = 6  # of the options that code makes of one row each, beside all files
FREE = {
    group: option_names(group)[: len(assets.option_files(group)) + MADE]
    for group in GROUPS
    if group not in OPTIONS and option_names(group)
}
ROWS = [
    {group: options[row % len(options)] for group, options in FREE.items()} | FITTING[row % len(FITTING)]
    for row in range(max(len(FITTING), *map(len, FREE.values())))
]


def run_of(*overrides: str) -> RunConfig:
    return from_hydra(compose(overrides))


def read(group: str, option: str) -> dict:
    return yaml.safe_load(assets.option_files(group)[option].read_text())


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_each_option_composes_into_a_run(row: dict[str, str]):
    run = run_of(*(f"{group}={option}" for group, option in row.items()))
    for group, option in row.items():
        named = getattr(getattr(run, group), "name", option)
        weights = group == "risk" and named in RISKS and option not in RISKS  # of a model, which they name
        assert named == option or weights, "an option is called as it names itself"
    assert (run.blocks.by, run.reallocation.mode) == (row["blocks"], row["reallocation"])
    assert run.budget == PRESETS[row["budget"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "option"), [(group, o) for group in OVERLAYS[1:] for o in assets.option_files(group)]
)
def test_each_sweep_and_debug_option_composes_into_a_run(group: str, option: str):
    """Experiments do in tests/golden."""
    assert run_of(f"{group}={option}").name == option


def test_each_option_has_a_line_for_list():
    for group in (*GROUPS, *OVERLAYS):
        for option, file in assets.option_files(group).items():
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
        if item.name not in ("name", "trainer", "risk", *OPTIONS):
            assert getattr(composed, item.name) == getattr(plain, item.name), item.name
    assert composed.risk.name == plain.risk.name
    for group in OPTIONS:  # a plain one knows no rows, so it has no options
        assert replace(getattr(composed, group), options={}) == getattr(plain, group), group


def test_budgets_of_conf_are_the_presets():
    assert set(option_names("budget")) == set(PRESETS)
    for name in assets.option_files("budget"):
        assert parse_budget(read("budget", name)) == PRESETS[name]


@pytest.mark.parametrize(
    ("group", "registry"),
    [("allocator", ALLOCATORS), ("risk", RISKS), *((group, registry(group)) for group in OPTIONS)],
)
def test_options_of_conf_are_those_of_the_registry(group: str, registry):
    own = [option for option in option_names(group) if group != "risk" or read(group, option)["name"] == option]
    assert set(own) == set(registry)


@pytest.mark.parametrize("group", OPTIONS)
def test_conf_offers_every_option_of_a_row_with_its_default(group: str):
    for name, row in registry(group).items():
        given = read(group, name)
        given = given["model"] if group == "model" else given
        assert {key: value for key, value in given.items() if key not in group_keys(group)} == dict(row.options), name


def test_conf_offers_every_weight_of_a_risk():
    for name in RISKS:
        assert set(SEVERITY) <= set(read("risk", name)["weights"]), "every risk falls back to the prior's terms"


# -- what a model brings along ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "task", "dataset", "batch_size", "steps"),
    [
        ("vit", "vision", "digits", 64, 400),
        ("llama", "language", "pysource", 16, 600),
        ("dit", "diffusion", "digits", 64, 800),
        ("unet", "diffusion", "digits", 64, 400),
    ],
)
def test_a_model_brings_its_task_data_batch_and_steps(model: str, task: str, dataset: str, batch_size: int, steps: int):
    run = run_of(f"model={model}")
    assert (run.model.name, run.task.name, run.dataset.name) == (model, task, dataset)
    assert (run.batch_size, run.trainer.max_steps, run.name) == (batch_size, steps, f"{model}_8gb")


def test_what_the_user_says_wins_wherever_it_stands():
    said = ["dataset=text", "dataset.path=mine.txt", "batch_size=4", "trainer.max_steps=7", "optim.lr=0.5"]
    for overrides in (["model=llama", *said], [*said, "model=llama"]):
        run = run_of(*overrides)
        assert (run.dataset.name, run.dataset.path, run.task.name) == ("text", "mine.txt", "language")
        assert (run.batch_size, run.trainer.max_steps, run.optim.lr) == (4, 7, 0.5)


def test_an_experiment_wins_over_the_model_and_the_user_over_both(tmp_path: Path, monkeypatch):
    (tmp_path / "mine.yaml").write_text(
        "# @package _global_\n# m\ndefaults: [override /model: llama, override /dataset: text]\n"
        "name: mine\nbatch_size: 3\n"
    )
    of_conf = assets.option_files
    files = {"mine": tmp_path / "mine.yaml"}
    monkeypatch.setattr(assets, "option_files", lambda group: files if group == "experiments" else of_conf(group))
    run = run_of("experiments=mine", "dataset.path=x")
    assert (run.model.name, run.task.name, run.dataset.name, run.batch_size) == ("llama", "language", "text", 3)
    assert run.trainer.max_steps == 600, "the model's, as neither says otherwise"
    assert run_of("experiments=mine", "dataset=pysource", "batch_size=5").batch_size == 5
    assert run_of("experiments=mine", "dataset=pysource").dataset.name == "pysource"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=llama", "dataset=digits"], r"dataset digits serves vision and diffusion, not language; .*pysource"),
        (
            ["dataset=pysource"],
            r"dataset pysource serves language and masked, not vision; data sets for vision: digits, npz",
        ),
        (
            ["task=language"],
            r"model vit is trained for vision, not language: .* choose a model for language: hf, llama",
        ),
    ],
)
def test_models_data_and_tasks_that_do_not_fit_are_refused(overrides: list[str], message: str):
    with pytest.raises(BadInputError, match=message):
        run_of(*overrides)


# -- what depends on the device ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_auto_means_small_on_a_cpu_and_binding_on_a_gpu():
    on_cpu, on_gpu = (resolve(run_of(), device=device) for device in ("cpu", "cuda"))
    assert (on_cpu.config.model.size, on_cpu.config.optim.lr, on_cpu.config.micro_batch) == ("tiny", 3e-3, 64)
    assert (on_gpu.config.model.size, on_gpu.config.optim.lr, on_gpu.config.micro_batch) == ("large", 2e-4, None)
    assert (on_cpu.needs_microbatch_search, on_gpu.needs_microbatch_search) == (
        False,
        True,
    )  # under a memory budget on CUDA the micro-batch is decided
    assert [on.config.trainer.precision for on in (on_cpu, on_gpu)] == ["32-true", "bf16-mixed"]
    assert on_cpu.reasons == ("optim.lr=0.003 suits vit tiny", "trainer.precision=32-true on cpu")
    by_size = resolve(run_of("budget=state_25"), device="cuda")
    assert by_size.config.micro_batch == 16 and not by_size.needs_microbatch_search
    assert "micro_batch=16 is meant for vit large in 8 GiB" in by_size.reasons
    assert on_gpu.size_reason == "model.size=auto takes large on cuda: budgets of 4 to 16 GiB bind there"
    sizes = {
        name: resolve(run_of(f"model={name}"), device="cuda").config.model.size for name in ("llama", "dit", "unet")
    }
    assert sizes == {"llama": "350m", "dit": "xl2", "unet": "cifar"}


def test_what_the_user_set_is_not_decided_again():
    said = ["model.size=base", "optim.lr=0.1", "micro_batch=32", "trainer.precision=bf16-true"]
    resolved = resolve(run_of(*said), device="cuda")
    assert resolved.reasons == () and resolved.size_reason == "model.size=base was asked for"
    run = resolved.config
    assert (run.optim.lr, run.micro_batch, run.trainer.precision) == (0.1, 32, "bf16-true")


def test_activations_of_16_bits_bring_their_precision_and_refuse_another():
    resolved = resolve(run_of("model.activations=bf16"), device="cpu")
    assert resolved.config.trainer.precision == "bf16-mixed"
    assert "trainer.precision=bf16-mixed for model.activations=bf16" in resolved.reasons
    with pytest.raises(
        BadInputError, match=r"model\.activations=bf16 needs layers that take bf16, but trainer\.precision=32"
    ):
        resolve(run_of("model.activations=bf16", "trainer.precision=32-true"), device="cpu")
    with pytest.raises(BadInputError, match=r"model\.activations"):
        run_of("model.activations=fp8")


def test_a_suitable_micro_batch_divides_the_batch():
    assert resolve(run_of("batch_size=60", "budget=state_25"), device="cuda").config.micro_batch == 15
    assert resolve(run_of("batch_size=8", "budget=state_25"), device="cuda").config.micro_batch == 8


@pytest.mark.parametrize(
    ("overrides", "device", "undecided"),
    [
        (["micro_batch=auto"], "cpu", True),
        (["objective=throughput"], "cpu", True),
        (["micro_batch=auto", "mode=eval", "resume=auto"], "cpu", False),
        (["micro_batch=16"], "cuda", False),
        (["micro_batch=16", "objective=balanced"], "cuda", True),  # activations may still be recomputed
        (["budget=auto"], "cuda", True),
        (["trainer.precision=bf16-true"], "cuda", False),
    ],
)
def test_a_decision_is_taken_where_something_is_left_to_it(overrides: list[str], device: str, undecided: bool):
    assert resolve(run_of(*overrides), device=device).needs_microbatch_search is undecided


def test_conf_offers_every_trainer_argument():
    assert list(read("trainer", "default")) == [item.name for item in fields(TrainerConfig)]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["7.5gb", "300mb", "state_33", "1tb"])
def test_any_size_is_an_option_of_budget(text: str):
    assert run_of(f"budget={text}").budget == parse_budget(text)


def test_options_that_a_pattern_asks_for_are_those_of_conf():
    assert option_values(["budget=glob(state_*)"], group="budget") == []


def test_limits_stand_beside_a_preset():
    assert run_of("budget=8gb", "budget.step_time=1.2").budget.step_time == 1.2
    hosted = run_of("budget=7.5gb", "budget.host_memory=16gb").budget
    assert (hosted.name, hosted.host_memory_bytes) == ("7.5gb", 16 * 2**30)
    assert run_of("catalogue=host").catalogue.specs == ("*", "*@streamed")
    with pytest.raises(BadInputError, match=r"allocator=host_every_kth was removed .* catalogue=host"):
        check_names(replace(run_of(), allocator=AllocatorConfig(name="host_every_kth")))
    smaller = run_of("budget=8gb", "budget.memory=300mb")
    assert (smaller.budget.name, smaller.budget.memory_bytes, smaller.name) == ("300mb", 300 * MIB, "vit_8gb")


def test_a_debug_group_comes_after_an_experiment():
    run = run_of("experiments=digits_state_25", "debug=fast_dev")
    assert (run.budget.name, run.trainer.max_steps) == ("state_25", 3)


def test_an_experiment_may_build_on_another_and_name_a_size(tmp_path: Path, monkeypatch):
    (tmp_path / "base.yaml").write_text("# @package _global_\n# b\ndefaults: [override /budget: 301mb]\nseed: 5\n")
    (tmp_path / "child.yaml").write_text("# @package _global_\n# c\ndefaults: [base]\nname: child\n")
    files = {file.stem: file for file in tmp_path.glob("*.yaml")}
    of_conf = assets.option_files
    monkeypatch.setattr(assets, "option_files", lambda group: files if group == "experiments" else of_conf(group))
    run = run_of("experiments=child")
    assert (run.name, run.seed, run.budget.memory_bytes) == ("child", 5, 301 * MIB)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [1", r"experiments/broken.yaml is no valid YAML: "),
        ("- 1", r"experiments/broken.yaml must hold keys and values"),
        ("optim: {lr: 1e-1, lr: 1e-3}", r"experiments/broken.yaml is no valid YAML: lr is written twice"),
        ("defaults: [override /budget: 8gbb]", r"cannot read budget=8gbb"),
    ],
)
def test_a_broken_experiment_is_named(content: str, message: str, tmp_path: Path, monkeypatch):
    file = tmp_path / "experiments" / "broken.yaml"
    file.parent.mkdir()
    file.write_text(content)
    monkeypatch.setattr(assets, "option_files", lambda group: {"broken": file} if group == "experiments" else {})
    with pytest.raises(BadInputError, match=message):
        run_of()


@pytest.mark.parametrize(
    "text", ["a: 1e-3 was best", "a: 2e4_steps", "a: [1e-3, -2E4, .5]", "{true: a, 1: b}", "{<<: {a: 1}, a: 2}"]
)
def test_yaml_is_read_as_hydra_reads_it(text: str):
    assert read_yaml(text) == OmegaConf.create(text)


@pytest.mark.parametrize(
    ("typed", "name"), [("4294967296", "4gb"), ("1_073_741_824", "1gb"), ("0.25", "state_25"), (".5", "state_50")]
)
def test_a_number_is_a_budget_on_the_command_line(typed: str, name: str):
    assert run_of(f"budget={typed}").budget == run_of(f"budget={name}").budget


def test_folders_of_jobs_are_safe_names():
    assert job_folder(0, "budget=4gb,seed=1") == "0_budget=4gb,seed=1"
    assert job_folder(2, "dataset.path=/a b/c") == "2_dataset.path=-a-b-c"
    assert job_folder(1, "") == "1"
    assert len(job_folder(3, "x" * 300)) < 100


def test_what_is_called_alike_as_options_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file may be called as a recipe is, and paths may differ in what no option's name can hold. Launched jobs, which
    get Hydra's singletons, know what was typed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    typed = ["recipe=muon8", "recipe=muon8.yaml", "recipe=a/x.yaml", "recipe=a-x.yaml"]
    for rate, word in enumerate(typed[1:], start=2):
        (tmp_path / word.partition("=")[2]).write_text(f"base: muon8\nlr: {{muon: {rate}}}\n")
    code = ["model=a/b.py:build", "model=a-b.py:build"]
    for _ in range(2):  # a second command of the process finds the names of the first
        for words in (typed, code):
            register(words)
            options = [with_option_names([word])[0] for word in words]
            assert len(set(options)) == len(words)
            Singleton.set_state(cloudpickle.loads(cloudpickle.dumps(Singleton.get_state())))
            assert as_typed(options) == words
    assert [run_of(word).recipe.lr.get("muon") for word in typed[1:]] == [2, 3, 4]
