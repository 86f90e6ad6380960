"""A user's own network, task and data by name: trained, resumed, planned; and one sentence for whatever is wrong."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from baoc.cli.failures import failure_of
from baoc.cli.main import main
from baoc.config.compose import compose
from baoc.config.from_hydra import from_hydra, write_config
from baoc.config.options import instantiate_targets
from baoc.core import own_code
from baoc.data import build_data
from baoc.errors import BadInputError
from baoc.models import build_model
from baoc.tasks import build_task
from baoc.types import ImageDataSpec, OwnDataSpec
from tests.support.paths import ROOT, read_config

pytestmark = pytest.mark.usefixtures("own_logging")  # runs leave their handlers open

FILE = ROOT / "tests" / "support" / "own_net.py"
SPEC = ImageDataSpec(dataset="x", image_size=8, channels=1, num_classes=3, num_train=9, num_val=9)
SHORT = ["trainer.max_steps=3", "budget=state_25", "trainer.enable_progress_bar=false", "batch_size=8", "device=cpu"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    """A folder of the user's with `net.py`, in which commands are given."""
    (tmp_path / "net.py").write_text(FILE.read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ran(*words: str) -> Path:
    assert main([*words, *SHORT, "hydra.run.dir=run"]) == 0
    return Path("run")


# -- names and arguments ----------------------------------------------------------------------------------------------


def test_a_function_of_a_file_is_a_model_with_the_arguments_that_its_signature_has(here):
    config = from_hydra(compose(["model=net.py:build", "model.width=24", "model.act._target_=torch.nn.Tanh"]))
    assert config.model.name == "net.py:build"
    assert config.name == "net.build_8gb"
    net = build_model(config.model.name, spec=SPEC, seed=0, **instantiate_targets(config.model.options))
    assert [p.shape[0] for p in net.parameters()] == [24, 24, 3, 3]
    assert isinstance(net.body[2], torch.nn.Tanh)
    again = build_model(config.model.name, spec=SPEC, seed=0, width=24)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))


def test_what_the_data_do_not_say_is_asked_for(here):
    """None in its place raised somewhere within the user's network."""
    unlabelled = OwnDataSpec(dataset="x", num_train=9, num_val=9)
    with pytest.raises(BadInputError, match=r"model=net\.py:build needs model\.num_classes=VALUE"):
        build_model("net.py:build", spec=unlabelled)


def test_target_is_the_same_by_a_modules_name(here):
    config = from_hydra(compose(["model._target_=torch.nn.Linear", "model.in_features=8", "model.out_features=3"]))
    assert config.model.name == "torch.nn.Linear"
    assert build_model(config.model.name, spec=SPEC, **config.model.options).weight.shape == (3, 8)


def test_a_written_configuration_is_read_again(here):
    config = from_hydra(compose(["model=net.py:build", "model.width=24", "task=net.py:loss", "dataset=net.py:data"]))
    write_config(config, path=here / "config.yaml")
    assert read_config(here / "config.yaml") == config


def test_a_relative_file_is_of_the_folder_of_the_command(here, tmp_path):
    (folder := here / "für uns (1)").mkdir()  # which Hydra's grammar cannot read
    assert from_hydra(compose([f"model={shutil.copy('net.py', folder)}:build"])).model.name.endswith("(1)/net.py:build")
    composed = compose(["model=net.py:build"])
    (here / "other").mkdir()
    assert from_hydra(composed, folder=here).model.name == "net.py:build"
    import os

    os.chdir(here / "other")
    assert from_hydra(composed, folder=here).model.name == f"{here}/net.py:build"


# -- what goes wrong, in one sentence ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("net.py:biuld", {}, "net.py defines no 'biuld'; it has: Net, build, loss, data"),
        ("net.py:", {}, "model=net.py: names no function: write model=net.py:NAME; it has: Net"),
        ("net.py:a-b", {}, "net.py defines no 'a-b'"),
        ("net.py", {}, "model=net.py names no function: write model=net.py:NAME; it has: Net"),
        ("net.py:VALUE", {}, "model=net.py:VALUE is a int, and must be a function or a class"),
        ("nett.py:build", {}, "model=nett.py:build: there is no file nett.py; the path is relative to"),
        (
            "net.py:build",
            {"widht": 3},
            "net.py:build has no argument 'widht' (did you mean model.width?); it takes: num",
        ),
        ("net.py:Net", {}, "model=net.py:Net needs model.width=VALUE"),
        ("net.py:raises", {}, "model=net.py:raises raised KeyError (net.py:"),
        ("net.py:number", {}, "model=net.py:number returned a int: it must return a torch.nn.Module"),
        ("net.py:empty", {}, "model=net.py:empty returned a Flatten without parameters to train"),
        (
            "nosuchpkg.Net",
            {},
            "model=nosuchpkg.Net: there is no package 'nosuchpkg': install it, or write FILE.py:NAME",
        ),
        ("torch.nn.Liner", {}, "defines no 'Liner'"),
        ("torch.nosuch.Linear", {}, "'nosuch'"),
    ],
)
def test_a_faulty_model_is_told_in_a_sentence(name, options, said, here):
    with pytest.raises(BadInputError) as caught:
        build_model(name, spec=SPEC, **options)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def build(:\n", "cannot be imported: it raised SyntaxError (bad.py:1): "),
        ("import nosuchthing\n", "cannot be imported: it raised ModuleNotFoundError (bad.py:1): No module named"),
        ("x = 1\n1 / 0\n", "cannot be imported: it raised ZeroDivisionError (bad.py:2): division by zero"),
    ],
)
def test_a_file_that_cannot_be_imported_is_told_in_a_sentence(text, said, here):
    (here / "bad.py").write_text(text)
    with pytest.raises(BadInputError) as caught:
        build_model("bad.py:build", spec=SPEC)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("net.py:one", "returned a int: it must return (train, val), or (train, val, facts)"),
        ("net.py:ragged", "have 'images' of shapes"),
        ("net.py:nothing", "dataset=net.py:nothing: its train part is empty"),
        ("net.py:words", "holds what is no tensor, array or number (text: str): convert it first"),
        ("net.py:raises", "dataset=net.py:raises needs dataset.num_classes=VALUE"),
    ],
)
def test_faulty_data_are_told_in_a_sentence(name, said, here):
    with pytest.raises(BadInputError) as caught:
        data = build_data(name, task="vision", batch_size=4)
        next(iter(data.make_train_loader(limit=None)))
    assert said in str(caught.value).replace(" of its train part", "")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("net.py:no_loss", "returned a Tensor of shape (2, 3): it must return the loss as a tensor of one number"),
        ("net.py:detached", "returned a loss without a gradient"),
        ("net.py:NoTask", "task=net.py:NoTask is a class of object: give a subclass of baoc.tasks.base.Task"),
        ("net.py:Net", "task=net.py:Net is a class of Module"),
    ],
)
def test_a_faulty_task_is_told_in_a_sentence(name, said, here):
    model = build_model("net.py:build", spec=SPEC)
    batch = {"images": torch.randn(2, 1, 8, 8), "labels": torch.tensor([0, 1])}
    with pytest.raises(BadInputError) as caught:
        task = build_task(name, model=model, spec=SPEC)
        task.training_step(batch, 0)
    assert said in str(caught.value)


def test_what_names_nothing_is_told_how_to_name_a_file():
    for group in ("model", "task", "dataset"):
        with pytest.raises(Exception) as caught:
            compose([f"{group}=nosuch"])
        assert "FILE.py:NAME or package.module.NAME" in failure_of(caught.value).message
    with pytest.raises(BadInputError, match=r"model=nosuch.py:build is not allowed: .* nosuch.py is not, seen from"):
        from_hydra(compose(["model=nosuch.py:build"]))
    with pytest.raises(BadInputError, match=r"model.size=tiny is of networks that come with sizes"):
        build_model("net.py:build", spec=SPEC, size="tiny")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("net.py:Lacking", "Lacking of your own code (net.py:Lacking) lacks what the traceback above asks it for"),
        ("net.py:Unlike", "the model returned a list and task vision needs logits (B, classes)"),
        ("net.py:Wide", "raised by your own code at net.py:"),
    ],
)
def test_what_fails_while_training_is_no_bug_of_ours(name, said, here, capsys):
    assert main([f"model={name}", *SHORT]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "this is a bug" not in err


# -- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_own_model_task_and_data_train_resume_and_say_what_has_changed(here, capsys):
    words = ["model=net.py:build", "task=net.py:loss", "task.scale=2.0", "dataset=net.py:data", "dataset.n=64"]
    folder = ran(*words)
    result = json.loads((folder / "result.json").read_text())
    assert result["quality"]["name"] == "val/loss" and result["metrics"]["val/scale"] == 2
    assert result["dataset"] == "net.data" and len(result["data_sha256"]) == 64
    assert set(result["code_sha256"]) == {"model=net.py:build", "task=net.py:loss", "dataset=net.py:data"}
    assert "model=net.py:build" in result["command"]
    longer = [word for word in SHORT if not word.startswith("trainer.max_steps")] + ["trainer.max_steps=4"]
    capsys.readouterr()
    assert main([*words, *longer, f"resume={folder}", "hydra.run.dir=again"]) == 0
    assert "changed" not in capsys.readouterr().out
    (here / "net.py").write_text((here / "net.py").read_text().replace("manual_seed(0)", "manual_seed(1)"))
    assert main([*words, *longer, f"resume={folder}", "hydra.run.dir=third"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "model=net.py:build has changed since the checkpoint (sha256" in said
    assert "the data of dataset=net.py:data has changed since the checkpoint" in said


@pytest.mark.slow
def test_a_plan_for_an_absent_card_is_made_or_says_why_not(here, capsys):
    plan = ["mode=plan", "device=rtx4090", "budget=2gb"]
    assert main(["model=net.py:build", *plan, "hydra.run.dir=plan"]) == 0
    assert json.loads(Path("plan/plan.json").read_text())["peak_bytes"] > 0
    assert main(["model=net.py:reads", *plan]) == 2
    assert "it is built without memory here (torch's meta device)" in capsys.readouterr().err.replace("It is", "it is")


def test_samples_without_images_have_a_description_of_their_own(here):
    data = build_data("net.py:pairs", task="vision", batch_size=4)
    assert data.spec == OwnDataSpec(dataset="net.pairs", num_train=20, num_val=20, num_classes=2)
    batch = next(iter(data.make_train_loader(limit=None)))
    assert batch["images"].shape == (4, 5) and batch["labels"].dtype == torch.int64


# -- entry points -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_installed_package_adds_models_data_tasks_rules_and_recipes(tmp_path: Path):
    (tmp_path / "theirs.py").write_text(
        FILE.read_text() + "\nRECIPE = {'hidden': 'half_sign', 'fallback': ['adamw']}\n"
    )
    (tmp_path / "theirs_rules.py").write_text(
        dedent("""
        from baoc.core.own_code import OwnRule
        from baoc.types import RuleInfo, StateDecl, StateKind

        INFO = RuleInfo(
            name="half_sign",
            description="half of the sign of momentum",
            states=(StateDecl(name="m", kind=StateKind.M, bias_corrected=False),),
            counts_steps=False,
        )
        ROW = OwnRule(info=INFO, storages=("fp32", "int8"), arithmetic="theirs_arithmetic")
        """)
    )
    (tmp_path / "theirs_arithmetic.py").write_text(
        dedent("""
        from baoc.optim.rules.base import Direction, Rule
        from theirs_rules import INFO

        class HalfSign(Rule):
            def direction(self, grad, *, states, ctx):
                return Direction(numerator=0.5 * states["m"].lerp_(grad, 1 - ctx.beta1).sign())

        RULES = (HalfSign(INFO),)
        """)
    )
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[baoc.models]\ntheirs_net = theirs:build\n[baoc.tasks]\ntheirs_loss = theirs:loss\n"
        "[baoc.datasets]\ntheirs_data = theirs:data\n[baoc.recipes]\ntheirs_recipe = theirs:RECIPE\n"
        "[baoc.rules]\nhalf_sign = theirs_rules:ROW\nbroken = theirs_rules:NOTHING\n"
    )
    words = [
        "model=theirs_net",
        "task=theirs_loss",
        "dataset=theirs_data",
        "recipe=theirs_recipe",
        *SHORT[:1],
        *SHORT[2:],
        "budget=unlimited",
    ]
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from baoc.cli.main import main\n"
        "for name in ('models', 'tasks', 'datasets', 'recipes', 'rules'): main(['--list', name])\n"
        f"sys.exit(main({[*words, 'hydra.run.dir=run']!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("theirs_net", "theirs_loss", "theirs_data", "theirs_recipe", "half_sign"):
        assert name in done.stdout
    assert "baoc.rules=broken" in done.stderr and "is left out" in done.stderr
    rows = (tmp_path / "run" / "allocation.json").read_text()
    assert "half_sign" in rows


def test_an_entry_point_of_another_kind_is_left_out_with_a_warning(monkeypatch, caplog):
    from importlib.metadata import EntryPoint

    point = EntryPoint(name="x", value="math:pi", group="baoc.rules")
    monkeypatch.setattr(own_code, "entry_points_of", lambda group: {"x": point})
    assert own_code.load_entry_points("baoc.rules", kind=own_code.OwnRule) == {}
    assert "baoc.rules=x of math:pi is a float and is left out" in caplog.text
