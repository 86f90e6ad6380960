"""Every row of MODELS, TASKS and DATASETS can be listed without torch, built by its name and trained for a step."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baoc.config.options import option_type
from baoc.config.validate import validate_value
from baoc.data import DATASETS, build_data
from baoc.errors import BadInputError
from baoc.models import MODELS, build_model, choose_size
from baoc.tasks import TASKS, build_task
from baoc.tasks.base import Task
from baoc.types import ImageDataSpec, TextDataSpec
from tests.support.stored import save_tokenizer
from tests.support.tiny import tiny_trainer

BUILT = {name: family for name, family in MODELS.items() if not family.needs_pretrained}  # without a file of the user's
MODEL_OF = {family.task: name for name, family in reversed(BUILT.items())}  # the first one of each task
READ = [(MODEL_OF[task], data) for data, row in DATASETS.items() for task in row.tasks if task in MODEL_OF]
TRAINED = [(name, "pysource" if family.task == "language" else "digits") for name, family in BUILT.items()]
SPECS = {
    "vision": ImageDataSpec(dataset="x", image_size=8, channels=1, num_classes=10, num_train=9, num_val=9),
    "diffusion": ImageDataSpec(dataset="x", image_size=8, channels=1, num_classes=10, num_train=9, num_val=9),
    "language": TextDataSpec(dataset="x", vocab_size=256, sequence_length=16, num_train=9, num_val=9),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What a row reads that has nothing of its own, or too much of it for a test."""
    path = tmp_path_factory.mktemp("data")
    rng, labels = np.random.default_rng(0), np.arange(60) % 3
    np.savez(path / "mine.npz", images=rng.random((60, 12, 12, 3)) + labels[:, None, None, None], labels=labels)
    np.save(path / "latents.npy", rng.standard_normal((60, 4, 8, 8)).astype(np.float32))
    save_tokenizer(path)
    turns = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    (path / "chat.jsonl").write_text("\n".join([json.dumps({"messages": turns})] * 40))
    (path / "mine.txt").write_text("to be or not to be, that is the question\n" * 200)
    pixels = rng.integers(0, 256, (60, 12, 12), dtype=np.uint8)
    for name, array in (("train-images-idx3-ubyte", pixels), ("train-labels-idx1-ubyte", labels.astype(np.uint8))):
        header = struct.pack(f">HBB{array.ndim}i", 0, 8, array.ndim, *array.shape)
        (path / name).write_bytes(header + array.tobytes())
    return path


def small(name: str, folder: Path) -> dict[str, Any]:
    """Arguments with which a row is small and reads no network."""
    if name == "synthetic_images":
        return {"num_samples": 40, "num_classes": 3, "image_size": 8, "channels": 1}
    if name == "random_latents":
        return {"num_samples": 40, "num_classes": 3, "val_fraction": 0.5}
    if name == "latents":
        return {"path": str(folder / "latents.npy"), "val_fraction": 0.2}
    if name == "chat":
        return {
            "path": str(folder / "chat.jsonl"),
            "tokenizer": str(folder),
            "sequence_length": 16,
            "val_fraction": 0.2,
        }
    if name == "fashion_mnist":
        return {"path": str(folder)}
    if "language" in DATASETS[name].tasks:
        return {"path": str(folder / "mine.txt"), "tokenizer": "bytes", "sequence_length": 16}
    return {} if name == "digits" else {"path": str(folder / "mine.npz")}


def test_rows_are_named_by_their_key_and_described_in_a_line():
    for registry in (MODELS, TASKS, DATASETS, *(family.sizes for family in MODELS.values())):
        for name, row in registry.items():
            assert row.name == name
            assert row.description and "\n" not in row.description and len(row.description) < 100


def test_rows_name_what_there_is():
    for family in MODELS.values():
        assert family.task in TASKS
        assert set(family.auto) == {"cpu", "cuda"} and set(family.auto.values()) <= set(family.sizes)
        assert all(size.lr > 0 for size in family.sizes.values())
    for row in DATASETS.values():
        assert set(row.tasks) <= set(TASKS)
        assert row.path_dataset is None or set(row.tasks) <= set(DATASETS[row.path_dataset].tasks)
        assert row.path_dataset is None or set(row.options) <= set(DATASETS[row.path_dataset].options)


def test_types_of_options_are_told_by_their_defaults_or_beside_them():
    for group, registry in (("model", MODELS), ("task", TASKS), ("dataset", DATASETS)):
        for name, row in registry.items():
            assert set(row.option_types) <= set(row.options), name
            for key, default in row.options.items():
                assert validate_value(default, option_type(row, key), key=f"{group}.{key}") == default


def test_listing_imports_no_torch():
    code = (
        "import sys; from baoc.data import DATASETS; from baoc.models import MODELS; from baoc.tasks import TASKS; "
        "sys.exit(', '.join({'torch', 'lightning', 'transformers', 'numpy'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def built(model_name: str, data_name: str, folder: Path) -> tuple[Task, Any]:
    """The task with its model, and the data."""
    task_name = MODELS[model_name].task
    data = build_data(data_name, task=task_name, batch_size=8, **small(data_name, folder))
    model = build_model(model_name, spec=data.spec, seed=0)
    if hasattr(model, "image_size"):
        data.resize_to(model.image_size)
    task = build_task(task_name, model=model, spec=data.spec)
    assert isinstance(task, Task)
    return task, data


@pytest.mark.slow
@pytest.mark.parametrize(("model_name", "data_name"), TRAINED)
def test_every_model_is_trained_whole(model_name, data_name, folder):
    task, data = built(model_name, data_name, folder)
    before = {name: parameter.detach().clone() for name, parameter in task.model.named_parameters()}
    trainer = tiny_trainer(max_steps=3, limit_val_batches=1, check_val_every_n_epoch=None, val_check_interval=3)
    trainer.fit(task, data)
    assert trainer.callback_metrics[task.quality[0]].isfinite()
    still = [name for name, parameter in task.model.named_parameters() if torch.equal(parameter, before[name])]
    assert not still, "these parameters were not trained"


@pytest.mark.parametrize(("model_name", "data_name"), READ)
def test_every_data_set_gives_what_its_task_trains_on(model_name, data_name, folder):
    task, data = built(model_name, data_name, folder)
    task.log = lambda *_, **__: None
    for loader in (data.train_dataloader(), data.val_dataloader()):
        assert task.training_step(next(iter(loader)), 0).isfinite()


@pytest.mark.parametrize(("name", "size"), [(name, size) for name in BUILT for size in MODELS[name].sizes])
def test_every_size_is_built_on_the_meta_device(name, size):
    with torch.device("meta"):
        model = build_model(name, spec=SPECS[MODELS[name].task], size=size)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    names = sorted(name for block in model.parameter_blocks().values() for name in block)
    assert names == sorted(dict(model.named_parameters()))


def test_unknown_names_are_refused_with_what_there_is():
    with pytest.raises(BadInputError, match=r"no model 'vitt' \(did you mean vit\?\); choose from: vit"):
        build_model("vitt", spec=None)
    with pytest.raises(BadInputError, match=r"no size of model vit 'bas' \(did you mean base\?\); choose from: auto"):
        choose_size("vit", size="bas")
    with pytest.raises(BadInputError, match=r"'7b'; choose from: auto.*huge; model=llama has that size$"):
        choose_size("vit", size="7b")
    with pytest.raises(BadInputError, match=r"no task 'speech'; choose from: vision, diffusion"):
        build_task("speech", model=torch.nn.Identity())
    with pytest.raises(BadInputError, match=r"no dataset 'mnist'; choose from: digits, npz"):
        build_data("mnist", task="vision", batch_size=8)


def test_data_set_that_does_not_serve_the_task_is_refused():
    text = "dataset digits serves vision and diffusion, not language; data sets for language: chat, pysource, text, c4"
    with pytest.raises(BadInputError, match=text):
        build_data("digits", task="language", batch_size=8)
    with pytest.raises(BadInputError, match=r"dataset npz needs dataset.path=\.\.\.: your own labelled images"):
        build_data("npz", task="vision", batch_size=8)
    with pytest.raises(BadInputError, match=r"dataset synthetic_images is generated and reads no dataset.path=x"):
        build_data("synthetic_images", task="vision", batch_size=8, path="x")
