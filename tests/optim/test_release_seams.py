"""What others know of gradient release: statistics by parts, a probe that drops gradients, the ledger, the settings."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from baoc.config.resolve import resolve
from baoc.config.schema import OptimConfig, RunConfig
from baoc.errors import BadInputError
from baoc.profiling import GradientProfiler, MemoryTracker, probe_footprint
from baoc.types import to_plain
from tests.support.gradients import Stream, make_block, make_params, normal

BLOCKS = [make_block("attn", (32, 16), (32, 16)), make_block("norm", (40,)), make_block("conv", (8, 4, 3, 3))]
SHAPES = {param.name: param.shape for block in BLOCKS for param in block.params}


def grads(step: int) -> dict[str, Tensor]:
    return {name: normal(*shape, seed=1000 * step + i) for i, (name, shape) in enumerate(SHAPES.items())}


def plain(profiler: GradientProfiler) -> dict[str, object]:
    """The profile without its timings and its size, which is a little more where gradients come by parts."""
    return {k: v for k, v in to_plain(profiler.profile()).items() if not k.endswith("_s") and k != "profile_bytes"}


def test_a_profile_by_parts_is_the_profile() -> None:
    """In another order, with a parameter that has no gradient in one step and a non-finite element in another."""
    whole = Stream(BLOCKS)
    parts = GradientProfiler(BLOCKS, make_params(BLOCKS), incremental=True)
    parts.begin_step(step=0)
    parts.add_gradients(grads(0))
    parts.end_step()
    for step in range(1, 140):
        found: dict[str, Tensor | None] = dict(grads(step))
        if step == 3:
            found["attn.1"] = None
        if step == 4:
            found["conv.0"][0, 0, 0, 0] = float("nan")  # pyright: ignore[reportOptionalSubscript]
        whole.feed(found)
        parts.begin_step(step=step)
        for name in reversed(found):
            if found[name] is not None:
                parts.add_gradients({name: found[name]})  # pyright: ignore[reportArgumentType]
        parts.end_step()
    assert plain(parts) == plain(whole.profiler)
    assert parts.num_samples > 70
    for name, moments in whole.profiler.second_moments().items():
        assert torch.equal(parts.second_moments()[name].row, moments.row), name
        assert torch.equal(parts.second_moments()[name].col, moments.col), name
    assert parts.nbytes == sum(t.nbytes for t in parts.buffers()) > whole.profiler.nbytes
    parts.free()
    assert parts.nbytes == 0


class Net(nn.Module):
    """Eight layers, of which the last is not used."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in list(self.layers)[:-1]:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("own_backward", [False, True])
def test_the_probe_drops_gradients_as_training_will(device: str, own_backward: bool) -> None:
    with torch.device(device):
        net, x = Net(), torch.ones(4, 32)
    blocks = [list(layer.parameters()) for layer in net.layers[:-2]]
    blocks.append([*net.layers[-2].parameters(), *net.layers[-1].parameters()])  # half of it has no gradient
    run = (lambda: net(x).backward()) if own_backward else (lambda: net(x))
    footprint = probe_footprint(net, run_micro_batch=run, released_blocks=blocks)
    layer = 4 * (32 * 32 + 32)
    assert footprint.released and footprint.gradients_bytes == 2 * layer, "one waits for what never comes"
    assert all(param.grad is None for param in net.parameters())

    tracker = MemoryTracker().count_existing(net, x)
    counts = dict.fromkeys(range(len(blocks)), 0)
    handles = []
    for index, block in enumerate(blocks):

        def hook(param: Tensor, index: int = index, block: list[Tensor] = block) -> None:
            counts[index] += 1
            if counts[index] % len(block) == 0:
                for each in block:
                    each.grad = None

        handles += [param.register_post_accumulate_grad_hook(hook) for param in block]
    with tracker:
        net(x).backward()
    assert footprint.forward_backward_bytes == tracker.peak_bytes
    for handle in handles:
        handle.remove()
    kept = probe_footprint(net, run_micro_batch=run)
    assert footprint.forward_backward_bytes < footprint.weights_bytes + 4 * layer
    assert footprint.weights_bytes < footprint.resident_bytes <= footprint.forward_backward_bytes
    # A sample of all gradients is put together when they are gone, beside the weights and the data.
    assert footprint.weights_bytes + x.nbytes <= footprint.settled_bytes < footprint.resident_bytes
    assert not kept.released and kept.gradients_bytes == 8 * layer  # also of the layer that this batch did not reach
    assert kept.forward_backward_bytes >= footprint.forward_backward_bytes + 4 * layer


def test_what_the_configuration_refuses() -> None:
    with pytest.raises(BadInputError, match=r"skip_step cannot be had with optim.release_gradients=true"):
        OptimConfig(release_gradients=True, nonfinite="skip_step")
    release = OptimConfig(release_gradients=True)
    with pytest.raises(BadInputError, match="micro_batch=16 of batch_size=64 accumulates 4: set micro_batch=null"):
        RunConfig(batch_size=64, micro_batch=16, optim=release)


def test_a_batch_is_one_micro_batch_where_none_was_set() -> None:
    """What suits a size on a GPU would accumulate."""
    config = RunConfig(batch_size=4096)
    assert resolve(config, device="cuda").config.accumulation > 1
    released = dataclasses.replace(config, optim=OptimConfig(release_gradients=True))
    assert resolve(released, device="cuda").config.accumulation == 1
