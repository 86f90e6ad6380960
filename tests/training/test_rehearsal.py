"""Steps that are rehearsed before training: what they contain, and that nothing is left of them."""

import os
import random
import signal
import time
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.aggregation import MeanMetric

from baoc.core.catalogue import SPECS
from baoc.optim import BlockwiseOptimizer, GradientRelease
from baoc.optim.backward import DropGradients
from baoc.profiling.proxy_blocks import ProxyBlocks
from baoc.training.measure import benchmark_steps
from baoc.training.measure.benchmark_steps import FEW, MAX_STEPS, WARM, rehearse
from baoc.training.measure.probe import silent


class NOTED:
    """What steps did: a module's own lists are as before once it was rehearsed."""

    logged: list[bool]
    gradients: list[int]


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        NOTED.logged, NOTED.gradients = [], []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        NOTED.gradients.append(sum(p.grad is not None for p in self.parameters()))
        loss = self.layers(batch).square().mean()
        self.log("train/loss", loss.detach())
        NOTED.logged.append("log" in self.__dict__)
        return loss


def rehearsed(net: Net, **changes: Any) -> float:
    given = {"accumulation": 1, "max_s": 60.0, "clip": (1.0, "norm")} | changes
    loss = given.pop("loss", lambda batch: net.training_step(batch, 0))
    return rehearse(loss, batch=torch.ones(2, 4), module=net, **given)


def test_a_rehearsal_runs_whole_steps_and_leaves_nothing(capfd: pytest.CaptureFixture[str]):
    net = Net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    deterministic = torch.are_deterministic_algorithms_enabled()
    assert rehearsed(net, accumulation=3) > 0
    assert len(NOTED.logged) == 3 * (WARM + MAX_STEPS) and all(NOTED.logged), "logged through the loop that was there"
    assert NOTED.gradients[:6] == [0, 4, 4, 4, 4, 4], "gradients of a step are there while the next one's forward runs"
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters()) and "log" not in net.__dict__
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    told = capfd.readouterr()
    assert told.out + told.err == ""


def test_long_steps_are_few_and_released_gradients_are_gone():
    net = Net()
    rehearsed(net, max_s=0.0, release=True, blocks=[list(layer.parameters()) for layer in net.layers])
    assert len(NOTED.logged) == 2, "one that is warm, one that counts"
    assert NOTED.gradients == [0, 0]


def test_released_blocks_are_stepped_in_hooks_by_small_ones(monkeypatch: pytest.MonkeyPatch):
    """What the host does for a block in backward is in the seconds; of the network not a bit changes, nor do numbers
    that are drawn afterwards."""
    net, stepped = Net(), []
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    step = DropGradients.step_with

    def seen(releaser: DropGradients, blocks: list[Any]) -> None:
        stepped.append([awaited.live.spec.name for awaited in blocks])
        assert net.layers[0].weight.grad is not None or net.layers[1].weight.grad is not None, "not gone before"
        step(releaser, blocks)

    L.seed_everything(0, verbose=False)
    expected = drawn()
    L.seed_everything(0, verbose=False)
    with monkeypatch.context() as patch:
        patch.setattr(ProxyBlocks, "compile", lambda self: None)
        patch.setattr(DropGradients, "step_with", seen)
        specs = [SPECS["adamw_int8+split8"], SPECS["muon"]]  # of which the second cannot step a bias
        blocks = [list(layer.parameters()) for layer in net.layers]
        assert rehearsed(net, max_s=0.0, clip=(1.0, "norm"), release=True, blocks=blocks, specs=specs) > 0
    assert stepped == [["adamw"], ["adamw_int8+split8"]] * 2 and NOTED.gradients == [0, 0]
    assert drawn() == expected
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert not any(param._post_accumulate_grad_hooks for param in net.parameters())


def test_kept_gradients_are_stepped_when_all_have_come(monkeypatch: pytest.MonkeyPatch):
    net, steps = Net(), []
    mask = BlockwiseOptimizer.mask_nonfinite
    monkeypatch.setattr(BlockwiseOptimizer, "mask_nonfinite", lambda self: (steps.append(self), mask(self))[1])
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    rehearsed(net, max_s=0.0, accumulation=2, blocks=[list(net.parameters())], specs=[SPECS["adamw_int8"]])
    assert len(steps) == 1 + 2 and NOTED.gradients == [0, 4, 4, 4], "once in a step of two micro-batches"
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_small_blocks_are_grouped_by_the_sizes_of_those_they_stand_for():
    net = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(6)))
    blocks = [[weight] for weight in net.parameters()]
    small = ProxyBlocks(blocks, specs=[SPECS["adamw"]] * 6, release=GradientRelease())
    assert small.optimizer.state_bytes() < 6 * 3000 and small.optimizer.releaser is not None
    small.optimizer.releaser.group_bytes_limit = 2**19  # two of the network's gradients
    for _ in range(2):
        for (param,) in reversed(blocks):
            small.gradient_ready(param)
        small.finish()
    assert set(small.optimizer.registry.step_groups.values()) == {("5", "4"), ("3", "2"), ("1", "0")}


def test_of_many_micro_batches_a_few_tell_how_long_all_take(monkeypatch: pytest.MonkeyPatch):
    net, now = Net(), [0.0]

    def loss(batch: Tensor) -> Tensor:
        now[0] += 0.01
        return net.training_step(batch, 0)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(benchmark_steps, "perf_counter", lambda: now[0])
    seconds = rehearsed(net, max_s=0.0, accumulation=40, loss=loss)
    assert len(NOTED.logged) == 2 * FEW and seconds == pytest.approx(40 * 0.01)


def test_an_interrupt_and_an_error_go_on_as_what_they_are():
    net = Net()
    handler = signal.getsignal(signal.SIGINT)

    def interrupted(_: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rehearsed(net, loss=interrupted)
    assert signal.getsignal(signal.SIGINT) == handler and "log" not in net.__dict__

    def full(_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError, match="full"):
        rehearsed(net, loss=full)


class Busy(Net):
    """Draws, counts, keeps buffers and logs a metric as an object, as modules of other people do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.mean = MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch * random.random() * np.random.rand(), batch_idx)
        self.mean(loss.detach())
        self.log("train/mean", self.mean, on_step=False, on_epoch=True)
        return loss


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_buffers_generators_and_metrics_are_as_before():
    L.seed_everything(0, verbose=False)
    expected = drawn()
    net = Busy()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    L.seed_everything(0, verbose=False)
    rehearsed(net, max_s=0.0)
    assert drawn() == expected
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_gradients_are_gone_where_memory_ended():
    net = Net()

    def full(batch: Tensor) -> Tensor:
        if len(NOTED.logged) == 2:
            raise torch.OutOfMemoryError("full")
        return net.training_step(batch, 0)

    with pytest.raises(torch.OutOfMemoryError, match="full"):
        rehearsed(net, loss=full, accumulation=4)
    assert all(param.grad is None for param in net.parameters()), "they would lie beside what is tried next"


def test_a_loss_of_nan_is_told_by_the_run_alone(capfd: pytest.CaptureFixture[str]):
    net = Net()
    rehearsed(net, max_s=0.0, loss=lambda batch: net.training_step(batch, 0) * torch.nan)
    told = capfd.readouterr()
    assert told.out + told.err == ""


def test_signals_are_for_those_who_listen(monkeypatch: pytest.MonkeyPatch):
    """Lightning's own handlers would end the run, or queue a Slurm job again and leave the stand-in's checkpoint."""
    for key, value in {"NTASKS": "1", "JOB_NAME": "job", "JOB_ID": "7", "PROCID": "0", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{key}", value)
    net, noted = Net(), []
    before = signal.signal(signal.SIGTERM, lambda *_: noted.append("SIGTERM"))

    def asked(batch: Tensor) -> Tensor:
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
        if len(NOTED.logged) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return net.training_step(batch, 0)

    try:
        assert rehearsed(net, loss=asked) > 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert noted == ["SIGTERM"]


class InPlace(Metric):
    """Adds to its states in place, as the documentation of torchmetrics does."""

    total: Tensor
    seen: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("seen", [], dist_reduce_fx="cat")

    def update(self, value: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.total += value
        self.seen.append(value)

    def compute(self) -> Tensor:
        return self.total


def test_metrics_keep_what_they_had_whatever_a_probe_does_to_them():
    net = Net()
    net.metric = metric = InPlace()
    metric.update(torch.tensor(1.0))
    total, seen = metric.total, metric.seen
    with silent(net):
        metric.update(torch.tensor(5.0))
        assert metric.compute() == 6
        metric.reset()
    assert metric.total is total and metric.seen is seen
    assert metric.compute() == 1 and len(seen) == 1 and metric._update_count == 1


def test_a_second_gradient_is_refused_by_training_not_by_a_rehearsal_that_knows_no_names():
    param = nn.Parameter(torch.ones(3))
    blocks = ProxyBlocks([[param]], specs=[SPECS["adamw"]], release=GradientRelease())
    for _ in range(2):
        blocks.gradient_ready(param)  # as where recomputed activations use it twice
        blocks.gradient_ready(param)
        blocks.finish()
