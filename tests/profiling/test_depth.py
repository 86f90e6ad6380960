"""Deep networks by a few of their layers: the same footprint as of the whole, or none."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from baoc.config.compose import compose
from baoc.config.from_hydra import from_hydra
from baoc.config.resolve import resolve
from baoc.models.switches import set_recomputed
from baoc.profiling.cuda_emulation import LARGE_PAGE
from baoc.profiling.depth import DEEP, SHALLOW, extrapolated, find_layer_stack
from baoc.profiling.timeline import ARRIVED
from baoc.training.measure.absent_card import fake_, fake_batch
from baoc.training.measure.microbatches import MicroBatchRunner
from baoc.training.run import build
from baoc.types import Footprint, PeakInterval

CASES = {
    "llama": ("model=llama", "model.size=60m", "dataset.sequence_length=32"),
    "vit": ("model=vit", "model.size=small", "dataset=synthetic_images", "dataset.image_size=32"),
    "dit": ("model=dit", "model.size=s2", "dataset=random_latents"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "accumulation", "checkpointing"),
    [("llama", 1, False), ("llama", 2, True), ("vit", 1, True), ("vit", 2, False), ("dit", 2, True)],
)
def test_a_few_layers_say_what_the_whole_network_needs(name, accumulation, checkpointing, tmp_path):
    resolved = resolve(from_hydra(compose([*CASES[name], "trainer.precision=bf16-mixed", "budget=8gb"])), device="cuda")
    with torch.device("meta"):
        task, data = build(resolved, run_dir=tmp_path, device="h100")
    batch = next(iter(data.make_train_loader(limit=None)))
    if checkpointing:
        set_recomputed(task.model, name=name)
    layers = find_layer_stack(task, layers=task.model.checkpoint_units)
    assert layers is not None and layers.depth > DEEP
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake_(task)
        trials = MicroBatchRunner(
            task,
            batch=fake_batch(batch),
            val_batch=None,
            device=torch.device("cpu"),
            precision="bf16-mixed",
            emulate_cuda=True,
        )

        def run(*, merge_intervals: bool):
            return trials.measure(2, accumulation=accumulation, timed=False, merge_intervals=merge_intervals).footprint

        whole = run(merge_intervals=True)
        parts = []
        for depth in (SHALLOW, DEEP):
            with layers.truncated(depth):
                parts.append(run(merge_intervals=False))
    sizes = {name: param.numel() * 4 for name, param in task.named_parameters()}
    made = extrapolated(*parts, layers=layers, sizes=sizes)
    assert made is not None
    bare = [
        replace(
            footprint,
            forward_backward_bytes=0,  # what is reserved beyond is an estimate
            intervals=tuple(
                replace(m, num_bytes=m.num_bytes - footprint.forward_backward_bytes) for m in footprint.intervals
            ),
        )
        for footprint in (whole, made)
    ]
    assert bare[0] == bare[1]
    assert made.forward_backward_bytes == pytest.approx(whole.forward_backward_bytes, abs=4 * LARGE_PAGE)
    assert len(task.model.checkpoint_units) == layers.depth, "the network is whole again"


def test_parts_that_differ_are_not_taken_for_each_other():
    def parts(*, last: int, bias: bool = True) -> nn.ModuleList:
        return nn.ModuleList([*(nn.Linear(8, 8) for _ in range(7)), nn.Linear(8, last, bias=bias)])

    alike = nn.Sequential(parts(last=8))
    assert find_layer_stack(alike, layers=list(alike[0])) is not None
    for other in (parts(last=9), parts(last=8, bias=False), parts(last=8)[:5]):
        assert find_layer_stack(nn.Sequential(other), layers=list(other)) is None
    frozen = parts(last=8)
    frozen[3].requires_grad_(False)
    assert find_layer_stack(nn.Sequential(frozen), layers=list(frozen)) is None


def test_a_layer_like_no_other_inner_one_is_found_from_wherever_it_is_seen():
    parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
    layers = find_layer_stack(nn.Sequential(parts), layers=list(parts))
    assert layers is not None

    def made(alive: Callable[[int, int], Iterable[int]]) -> Footprint | None:
        """Of gradients that come in turn, while 16-bit copies of the layers `alive(running, depth)` are held."""
        name = f"{layers.prefix}{{}}.weight".format
        short, long = (
            Footprint(
                device="cpu",
                micro_batch=1,
                weights_bytes=0,
                gradients_bytes=0,
                forward_backward_bytes=100,
                validation_bytes=0,
                resident_bytes=0,
                intervals=tuple(
                    PeakInterval(name=ARRIVED + name(i), num_bytes=100, copies={name(j): 10 for j in alive(i, depth)})
                    for i in range(depth)
                ),
            )
            for depth in (SHALLOW, DEEP)
        )
        return extrapolated(short, long, layers=layers, sizes={name(i): 0 for i in range(8)})

    for alike in (lambda _, depth: range(depth), lambda i, _: range(i), lambda i, depth: range(i, depth)):
        assert made(alike) is not None
    for one_apart in (
        lambda i, _: [2] if i == 0 else [],
        lambda i, depth: [2] if i == depth - 1 else [],
        lambda i, depth: [1, 3] if i == depth - 1 else [],
        lambda i, depth: [depth - 2] if i == depth - 1 else [],
    ):
        assert made(one_apart) is None
