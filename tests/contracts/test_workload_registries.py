"""Every row of MODELS, TASKS and DATASETS can be listed without torch, built by its name and trained for a step."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from baoc.data import DATASETS, build_data
from baoc.errors import BadInputError
from baoc.models import MODELS, build_model, choose_size
from baoc.tasks import TASKS, build_task
from baoc.tasks.base import Task
from tests.tiny import LIGHTNING_NOISE, tiny_trainer

pytestmark = LIGHTNING_NOISE
PAIRS = [(model, data) for model in MODELS for data in DATASETS if MODELS[model].task in DATASETS[data].tasks]


@pytest.fixture(scope="module")
def user_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "mine.npz"
    labels = np.arange(60) % 3
    np.savez(path, images=np.random.default_rng(0).random((60, 12, 12, 3)) + labels[:, None, None, None], labels=labels)
    return str(path)


def test_rows_are_named_by_their_key_and_described_in_a_line():
    for registry in (MODELS, TASKS, DATASETS, *(family.sizes for family in MODELS.values())):
        for name, row in registry.items():
            assert row.name == name
            assert row.description and "\n" not in row.description and len(row.description) < 100


def test_rows_name_what_there_is():
    for family in MODELS.values():
        assert family.task in TASKS
        assert family.auto in family.sizes
    for row in DATASETS.values():
        assert set(row.tasks) <= set(TASKS)
        assert DATASETS[row.path_row].needs_path


def test_listing_imports_no_torch():
    code = (
        "import sys; from baoc.data import DATASETS; from baoc.models import MODELS; from baoc.tasks import TASKS; "
        "sys.exit(', '.join({'torch', 'lightning', 'transformers', 'numpy'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("model_name", "data_name"), PAIRS)
def test_every_model_takes_a_step_on_every_data_set_of_its_task(model_name, data_name, user_file):
    path = user_file if DATASETS[data_name].needs_path else None
    data = build_data(data_name, task=MODELS[model_name].task, batch_size=16, path=path)
    model = build_model(model_name, spec=data.spec, seed=0)
    data.resize_to(model.image_size)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    task = build_task(MODELS[model_name].task, model=model)
    assert isinstance(task, Task)
    trainer = tiny_trainer(max_steps=2, limit_val_batches=1, check_val_every_n_epoch=None, val_check_interval=2)
    trainer.fit(task, data)
    assert trainer.callback_metrics[task.quality[0]].isfinite()
    still = [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]
    assert not still, "these parameters were not trained"


@pytest.mark.parametrize(("name", "size"), [(name, size) for name in MODELS for size in MODELS[name].sizes])
def test_every_size_is_built_on_the_meta_device(name, size):
    data = build_data(next(d for m, d in PAIRS if m == name), task=MODELS[name].task, batch_size=16)
    with torch.device("meta"):
        model = build_model(name, spec=data.spec, size=size)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    names = sorted(name for block in model.parameter_blocks().values() for name in block)
    assert names == sorted(dict(model.named_parameters()))


def test_unknown_names_are_refused_with_what_there_is():
    with pytest.raises(BadInputError, match=r"no model 'vitt' \(did you mean vit\?\); choose from: vit"):
        build_model("vitt", spec=None)
    with pytest.raises(BadInputError, match=r"no size of model vit 'bas' \(did you mean base\?\); choose from: auto"):
        choose_size("vit", size="bas")
    with pytest.raises(BadInputError, match=r"no option of model vit 'drop'.*choose from: dropout"):
        build_model("vit", spec=None, drop=0.1)
    with pytest.raises(BadInputError, match=r"no task 'speech'; choose from: vision"):
        build_task("speech", model=torch.nn.Identity())
    with pytest.raises(BadInputError, match=r"no option of task vision 'smoothing'.*choose from: label_smoothing"):
        build_task("vision", model=torch.nn.Identity(), smoothing=0.1)
    with pytest.raises(BadInputError, match=r"no dataset 'mnist'; choose from: digits, npz"):
        build_data("mnist", task="vision", batch_size=8)
    with pytest.raises(BadInputError, match=r"no option of dataset digits 'fraction'.*choose from: val_fraction"):
        build_data("digits", task="vision", batch_size=8, fraction=0.1)


def test_data_set_that_does_not_serve_the_task_is_refused():
    with pytest.raises(BadInputError, match="dataset digits serves vision, not language; data sets for language: none"):
        build_data("digits", task="language", batch_size=8)
    with pytest.raises(BadInputError, match=r"dataset npz needs dataset.path=\.\.\.: your own labelled images"):
        build_data("npz", task="vision", batch_size=8)
