"""A plan for which nothing is allocated counts the bytes that a probe of the same network finds: every model."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from baoc.config.compose import compose
from baoc.config.from_hydra import from_hydra
from baoc.config.resolve import resolve
from baoc.core.blocks import partition
from baoc.models.switches import recomputable_layers, set_recomputed
from baoc.parallel import Ranks
from baoc.planning.microbatch import interpolate, with_gradient_release
from baoc.profiling import describe
from baoc.profiling.bf16_params import cast_to_bf16
from baoc.profiling.footprint import SCALARS_BYTES
from baoc.training.measure import microbatches
from baoc.training.measure.absent_card import fake_, fake_batch
from baoc.training.measure.microbatches import MicroBatchRunner
from baoc.training.run import build
from baoc.training.session import declared_blocks
from baoc.types import PeakInterval
from tests.support.planners import footprint as made_footprint
from tests.support.training_runs import brief

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def trains_briefly() -> Iterator[None]:
    """With layers that may be recomputed by turns."""
    with brief(depth=2):
        yield


SIZES = {"llama": ("nano", 4), "vit": ("tiny", 8), "dit": ("tiny", 4), "unet": ("tiny", 4)}


def footprint(name: str, *, checkpointing: bool, fake: bool, narrow: bool, run_dir):
    size, micro_batch = SIZES[name]
    resolved = resolve(from_hydra(compose([f"model={name}", f"model.size={size}"])), device="cpu")
    with torch.device("meta" if fake else "cpu"):
        task, data = build(resolved, run_dir=run_dir, device="cpu")
    if checkpointing:
        set_recomputed(task.model, name=name)
    batch = next(iter(data.make_train_loader(limit=None)))

    def run(batch):
        device = torch.device("cpu")
        trials = MicroBatchRunner(task, batch=batch, val_batch=None, device=device, precision="bf16-mixed")
        params = {name: param for name, param in task.named_parameters() if param.ndim > 1 and narrow}
        with cast_to_bf16(params):
            return trials.measure(micro_batch, accumulation=1, timed=False).footprint

    if not fake:
        return run(batch)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake_(task)
        return run(fake_batch(batch))


@pytest.mark.parametrize(
    ("name", "checkpointing"), [("llama", True), ("vit", False), ("vit", True), ("dit", True), ("unet", False)]
)
def test_fake_tensors_count_what_real_ones_take(name, checkpointing, tmp_path):
    """Transformers whose activations are recomputed with matrices in 16 bits, as what has no room in full is tried."""
    given = {"checkpointing": checkpointing, "narrow": checkpointing and name != "unet", "run_dir": tmp_path}
    fake, real = (footprint(name, fake=f, **given) for f in (True, False))
    assert fake.gradient_order == real.gradient_order
    assert (fake.weights_bytes, fake.gradients_bytes) == (real.weights_bytes, real.gradients_bytes)
    assert [m.copies for m in fake.intervals] == [m.copies for m in real.intervals]
    for found, measured in zip(fake.intervals, real.intervals, strict=True):
        near = max(SCALARS_BYTES, measured.num_bytes / 100)  # tables of a task, such as of noise levels
        assert abs(found.num_bytes - measured.num_bytes) <= near
    assert abs(fake.resident_bytes - real.resident_bytes) <= SCALARS_BYTES


def test_trials_cast_as_training_does():
    """Lightning's autocast keeps no copies, which would be there all forward where activations are recomputed."""
    given = {"batch": None, "val_batch": None, "device": torch.device("cpu"), "precision": "bf16-mixed"}
    with MicroBatchRunner(L.LightningModule(), **given).autocast():
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
        assert torch.is_autocast_enabled("cpu") and not torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("tried", ["measure", "compile", "time_micro_batch", "time_training_step"])
def test_ranks_agree_on_whatever_a_trial_runs(tried: str):
    """An error of one, of its batch too, is one of all."""
    inside: list[bool] = []

    class Agreeing(Ranks):
        def run_or_raise_on_all(self, make, *, has_collectives=False):
            inside.append(has_collectives)
            try:
                return make()
            finally:
                inside.pop()

    class Module(L.LightningModule):
        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            seen.append(list(inside))
            return batch

        def training_step(self, batch, _):
            seen.append(list(inside))
            return self.net(batch).sum()

    seen: list[list[bool]] = []
    module = Module()
    module.net = torch.nn.Linear(4, 1)
    cpu = torch.device("cpu")
    trials = MicroBatchRunner(module, batch=torch.ones(4, 4), val_batch=None, device=cpu, precision="32-true")
    trials.ranks = Agreeing()
    given = {
        "measure": {"accumulation": 1},
        "time_micro_batch": {"per_step": 1},
        "time_training_step": {"per_step": 1, "clip": (None, None)},
    }
    getattr(trials, tried)(2, **given.get(tried, {}))
    assert len(seen) > 1 and all(each == [True] for each in seen)


@pytest.mark.parametrize(
    ("tried", "given"), [("measure", {"accumulation": 1}), ("compile", {}), ("time_micro_batch", {"per_step": 2})]
)
def test_what_is_tried_leaves_running_statistics_and_generators_as_they_were(tried: str, given: dict[str, int]):
    class Module(L.LightningModule):
        def training_step(self, batch, _):
            return self.net(torch.nn.functional.dropout(batch)).sum()

    module = Module()
    module.net = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    trials = MicroBatchRunner(
        module, batch=torch.randn(4, 4), val_batch=None, device=torch.device("cpu"), precision="32-true"
    )
    before, generator = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    getattr(trials, tried)(4, **given)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator) and all(p.grad is None for p in module.parameters())


def test_validation_counts_where_only_a_later_look_knows_intervals(monkeypatch: pytest.MonkeyPatch):
    """Of the first look the largest number alone is known, as of steps too long to be followed."""
    made: dict[str, Any] = {"batch": torch.ones(4, 4), "val_batch": torch.ones(4, 4), "precision": "32-true"}
    trials = MicroBatchRunner(L.LightningModule(), device=torch.device("cpu"), **made)
    first = replace(made_footprint(2), validation_bytes=10**9, intervals=())
    later = replace(first, validation_bytes=0, intervals=(PeakInterval(name="backward", num_bytes=9),))
    looks = iter([first, later])
    monkeypatch.setattr(microbatches, "probe_footprint", lambda *_, **__: next(looks))
    for _ in range(2):
        found = trials.measure(2, accumulation=1, timed=False).footprint
        assert found.peak_bytes(state_bytes=0) >= 10**9


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", ["vit", "llama"])
def test_no_number_of_recomputed_layers_takes_more_than_none_and_all_predict(name, accumulation, tmp_path):
    """For the peak and where gradients are released, by the line between both ends and by refined ones."""
    size, micro_batch = SIZES[name]
    resolved = resolve(from_hydra(compose([f"model={name}", f"model.size={size}"])), device="cpu")
    task, data = build(resolved, run_dir=tmp_path, device="cpu")
    batch = next(iter(data.make_train_loader(limit=None)))
    trials = MicroBatchRunner(task, batch=batch, val_batch=None, device=torch.device("cpu"), precision="32-true")
    blocks = partition(describe(task), declared=declared_blocks(task, among=dict(task.named_parameters())))
    measured = {}
    for number in range(len(recomputable_layers(task.model)) + 1):
        set_recomputed(task.model, number, name=name)
        measured[number] = trials.measure(micro_batch, accumulation=accumulation, timed=False).footprint
    most = max(measured)
    peaks = {number: found.peak_bytes(state_bytes=0) for number, found in measured.items()}
    assert most >= 2 and peaks[0] > peaks[1] > peaks[2]
    for number in range(1, most):
        line = interpolate(measured[0], measured[most], share=number / most)
        assert peaks[number] <= line.peak_bytes(state_bytes=0) <= peaks[number - 1], "by less than a layer"
        refined = interpolate(measured[number], measured[most], share=1 / (most - number))
        assert refined.peak_bytes(state_bytes=0) >= peaks[number + 1]
        if accumulation == 1:
            dropped, real = (
                with_gradient_release(found, blocks=blocks, grouped=False) for found in (line, measured[number])
            )
            assert dropped is not None and real is not None
            assert dropped.peak_bytes(state_bytes=0) >= real.peak_bytes(state_bytes=0)
