"""The probe predicts what a tracked training loop then holds, to the byte, and leaves nothing behind."""

import pickle
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from baoc.core.catalogue import SPECS
from baoc.errors import BadInputError
from baoc.optim import BlockwiseOptimizer
from baoc.planning.cards import CARDS
from baoc.planning.cost import grouped_bytes
from baoc.profiling import FirstStepMemory, MemoryTracker, probe_footprint, step_temporary_bytes
from baoc.profiling import footprint as module_of_footprints
from baoc.profiling import step_temporaries as module
from baoc.profiling.cuda_emulation import CachingAllocator
from baoc.profiling.footprint import SCALARS_BYTES, memory_reserve_bytes, preserved_state, waiting_gradient_bytes
from baoc.profiling.memory import LATE_MODULES_BYTES
from baoc.profiling.step_temporaries import step_temporaries
from baoc.units import KIB, MIB

F32 = 4


class Net(nn.Module):
    """Norm statistics, dropout, and a count that only training moves."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.body(x)).square().mean()


def data(batch: int = 16, device: str = "cpu") -> Tensor:
    return torch.ones(batch, 32, device=device)


def train_step(net: nn.Module, x: Tensor, order: str, *, accumulation: int = 1) -> None:
    """A step without its optimizer, in Lightning's order (`forward_first`) or the tutorials' (`zero_first`)."""
    for part in range(accumulation):
        if order == "zero_first" and part == 0:
            net.zero_grad()
        loss = net(x) / accumulation
        if order == "forward_first" and part == 0:
            net.zero_grad()
        loss.backward()


def tracked_peak(net: nn.Module, x: Tensor, order: str, **options: int) -> tuple[int, int]:
    """(peak, live bytes after backward) over three steps."""
    tracker = MemoryTracker().count_existing(net, x)
    with tracker:
        for _ in range(3):
            train_step(net, x, order, **options)
    return tracker.peak_bytes, tracker.current_bytes


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_loss_is_probed_in_lightning_s_order_and_equals_training(accumulation: int):
    net, x = Net(), data()
    footprint = probe_footprint(net, run_micro_batch=lambda: net(x) / accumulation, accumulation=accumulation)
    peak, resident = tracked_peak(net, x, "forward_first", accumulation=accumulation)
    assert footprint.forward_backward_bytes == peak
    assert footprint.resident_bytes == resident
    assert footprint.gradients_bytes == sum(p.nbytes for p in net.parameters() if p.requires_grad)
    assert footprint.weights_bytes == sum(t.nbytes for t in (*net.parameters(), *net.buffers()))
    assert (footprint.source, footprint.device) == ("probe", "cpu")


def test_gradients_of_the_step_before_are_alive_in_lightning_s_forward():
    """Where the forward holds most, the old gradients make the difference to the tutorials' order."""

    class Peaky(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                shift = torch.zeros(500, 500).mean()
            return super().forward(x + shift)

    net, x = Peaky(), data()
    lightning = probe_footprint(net, run_micro_batch=lambda: net(x)).forward_backward_bytes
    tutorial, _ = tracked_peak(net, x, "zero_first")
    gradients = sum(p.nbytes for p in net.parameters() if p.requires_grad)
    assert lightning == tutorial + gradients
    # Buckets of DistributedDataParallel keep them, also where the callable runs backward itself.
    kept = probe_footprint(net, run_micro_batch=lambda: net(x).backward(), accumulation=2).forward_backward_bytes
    assert kept == lightning


@pytest.mark.parametrize("order", ["zero_first", "forward_first", "outside"])
def test_a_callable_that_does_its_own_backward_keeps_its_own_order(order: str):
    net, x = Net(), data()
    footprint = probe_footprint(net, run_micro_batch=lambda: train_step(net, x, order))
    peak, _ = tracked_peak(net, x, "zero_first" if order == "outside" else order)
    assert footprint.forward_backward_bytes == peak


def test_parameters_will_do_instead_of_a_module():
    net, x = nn.Linear(32, 8), data()
    by_module = probe_footprint(net, run_micro_batch=lambda: net(x).sum().backward())
    by_params = probe_footprint(list(net.parameters()), run_micro_batch=lambda: net(x).sum().backward())
    assert by_params == by_module


def test_a_table_with_sparse_gradients_beside_the_optimizer_is_counted():
    net = nn.Sequential(nn.Embedding(1000, 16, sparse=True), nn.Flatten(), nn.Linear(16, 2))
    rows, layer = 10 * 8 + 10 * 16 * 4, (32 + 2) * 4  # the rows' indices and values
    assert probe_footprint(net, run_micro_batch=lambda: net(torch.arange(10)).sum()).gradients_bytes == rows + layer
    own = probe_footprint(net, run_micro_batch=lambda: net(torch.arange(10)).sum().backward())
    assert own.gradients_bytes == 2 * rows + layer  # of two passes: rows of sparse gradients are not added up


def test_validation_runs_in_evaluation_and_inference_mode_beside_the_gradients():
    net, x = Net(), data(256)
    seen = []

    def validate() -> None:
        seen.append((net.training, net.body.training, torch.is_inference_mode_enabled()))
        net(x)

    footprint = probe_footprint(net, run_micro_batch=lambda: net(x[:4]), run_validation_batch=validate)
    assert seen == [(False, False, True)]
    tracker = MemoryTracker().count_existing(net, x)
    train_step(net, x[:4], "zero_first")
    net.eval()
    tracker.count_existing(net)
    with tracker, torch.inference_mode():
        net(x)
    assert footprint.validation_bytes == tracker.peak_bytes
    assert footprint.validation_bytes > footprint.forward_backward_bytes


def test_nothing_is_left_behind():
    net, x = Net(), data()
    net.body[3].eval()  # a mode of its own
    net.body[0].weight.grad = torch.ones(64, 32)
    modes = [module.training for module in net.modules()]
    buffers = {name: (id(buffer), buffer.clone()) for name, buffer in net.named_buffers()}

    def run() -> Tensor:
        random.random(), np.random.rand()
        net.body[1].running_mean = torch.full((64,), 7.0)  # replaced, not only written to
        return net(x + torch.rand(1))

    random.seed(1), np.random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), pickle.dumps(np.random.get_state()), torch.get_rng_state()
    probe_footprint(net, run_micro_batch=run, run_validation_batch=run)
    after = random.getstate(), pickle.dumps(np.random.get_state()), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])
    assert [module.training for module in net.modules()] == modes
    assert all(param.grad is None for param in net.parameters())
    for name, buffer in net.named_buffers():
        assert id(buffer) == buffers[name][0], name
        assert torch.equal(buffer, buffers[name][1]), name


class Averaging(nn.Module):
    """Its forward writes into three of its weights, one of them behind autograd's back."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 8, max_norm=0.1)
        self.head = nn.Linear(8, 4)
        self.average = nn.Parameter(torch.zeros(4, 8), requires_grad=False)

    def forward(self, indices: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.lerp_(self.head.weight, 0.5)
        self.head.bias.data += 1
        return self.head(self.table(indices)).square().sum()


def test_what_a_forward_writes_into_parameters_is_put_back():
    net, indices = Averaging(), torch.arange(5)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for _ in range(2):  # the second look knows, and watches no more
        probe_footprint(net, run_micro_batch=lambda: net(indices))
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    with preserved_state(net, list(net.parameters())):  # as a rehearsal does, which watches nothing
        net(indices)
    changed = [name for name, value in net.state_dict().items() if not torch.equal(value, before[name])]
    assert not changed
    net(indices)
    changed = [name for name, value in net.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["average", "table.weight", "head.bias"]


def test_a_look_that_ran_out_of_memory_has_not_seen_all_writes():
    net, indices, full = Averaging(), torch.arange(5), [True, False]
    before = {name: value.clone() for name, value in net.state_dict().items()}

    def run() -> Tensor:
        if full.pop(0):
            raise torch.OutOfMemoryError("full")
        full.append(False)
        return net(indices)

    with pytest.raises(torch.OutOfMemoryError):
        probe_footprint(net, run_micro_batch=run)
    probe_footprint(net, run_micro_batch=run)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_failing_callable_leaves_nothing_behind_either():
    net = Net()
    state = torch.get_rng_state()

    def run() -> Tensor:
        net(data()).backward()
        net.eval()
        raise RuntimeError("no such batch")

    with pytest.raises(RuntimeError, match="no such batch"):
        probe_footprint(net, run_micro_batch=run)
    assert net.training
    assert torch.equal(state, torch.get_rng_state())
    assert all(param.grad is None for param in net.parameters())


def test_the_same_probe_twice_gives_the_same_footprint():
    net, x = Net(), data()
    assert probe_footprint(net, run_micro_batch=lambda: net(x)) == probe_footprint(net, run_micro_batch=lambda: net(x))


def test_a_model_on_meta_has_the_footprint_of_the_real_one():
    net, x = Net(), data()
    with torch.device("meta"):
        net_meta, x_meta = Net(), data(device="meta")
    real = probe_footprint(net, run_micro_batch=lambda: net(x), run_validation_batch=lambda: net(x))
    meta = probe_footprint(
        net_meta, run_micro_batch=lambda: net_meta(x_meta), run_validation_batch=lambda: net_meta(x_meta)
    )
    assert meta.device == "meta"
    assert abs(meta.forward_backward_bytes - real.forward_backward_bytes) <= 0.03 * real.forward_backward_bytes
    assert meta.resident_bytes == real.resident_bytes


def adamw_step(numel: int):
    param = nn.Parameter(torch.zeros(numel))
    param.grad = torch.ones(numel)
    optimizer = torch.optim.AdamW([param], foreach=False, fused=False)
    return lambda: optimizer.step() and None


def test_temporaries_of_a_step_are_beyond_its_state():
    """torch's AdamW makes v's root and the denominator; its state, made in the first step, is no temporary."""
    assert step_temporary_bytes(lambda: adamw_step(1000), device="cpu") == 2 * 1000 * F32
    net = nn.Linear(4, 4)
    footprint = probe_footprint(net, run_micro_batch=lambda: net(torch.ones(1, 4)).sum())
    footprint = replace(footprint, step_temporary_bytes={"adamw": 8000})
    assert footprint.peak_bytes(state_bytes=0, specs=("adamw",)) == footprint.resident_bytes + 8000 + SCALARS_BYTES


@pytest.mark.parametrize("spec", ["adamw_bf16", "rmsprop_bf16", "signum_int8", "adafactor_momentum_int8"])
def test_temporaries_of_one_tensor_are_gone_when_the_next_is_stepped(spec: str):
    """A plan counts those of the largest tensor alone; the matched rules among these step in code of their own."""

    def make(tensors: int) -> Callable[[], None]:
        params = [nn.Parameter(torch.ones(64, 64)) for _ in range(tensors)]
        for param in params:
            param.grad = torch.linspace(-1, 1, param.numel()).view_as(param)
        return BlockwiseOptimizer(params, SPECS[spec], backend="eager").step

    one, three = (step_temporary_bytes(lambda n=n: make(n), device="cpu") for n in (1, 3))
    assert abs(three - one) <= 1024, "beside scalars"


def test_the_first_step_of_a_plain_loop_bounds_its_peak():
    net, x = Net().requires_grad_(True), data(64)
    params = list(net.parameters())
    memory = FirstStepMemory(params, context_bytes=7)
    optimizer = torch.optim.SGD(params, lr=0.1, foreach=False)
    net(x).backward()
    optimizer.step()
    footprint = memory.finish(state_bytes=0)
    optimizer.zero_grad()
    expected, _ = tracked_peak(net, x, "zero_first")
    buffers = sum(buffer.nbytes for buffer in net.buffers())  # unknown until they are used: they join then
    assert expected - buffers <= footprint.forward_backward_bytes <= expected
    weights = sum(p.nbytes for p in params)
    assert footprint.weights_bytes == footprint.gradients_bytes == weights
    assert footprint.resident_bytes == 2 * weights
    assert (footprint.device, footprint.micro_batch, footprint.validation_bytes) == ("cpu", 0, 0)
    assert footprint.context_bytes == 7 and footprint.reserve_bytes == SCALARS_BYTES and not footprint.released
    memory.stop()  # after the end: nothing
    with pytest.raises(AssertionError, match=r"^the first step was finished before"):
        memory.finish(state_bytes=0)


@pytest.mark.parametrize("order", ["zero_first", "forward_first"])
def test_a_first_step_counts_forward_beside_gradients_and_parameters_that_had_none_yet(order: str):
    net, idle, x = Net(), nn.Linear(32, 64), data()
    memory = FirstStepMemory([*net.parameters(), *idle.parameters()])
    loss = net(x)
    if order == "forward_first":
        memory.record_zeroing()
    loss.backward()
    found = memory.finish(state_bytes=0)
    del loss
    expected, _ = tracked_peak(net, x, order)
    buffers, later = sum(b.nbytes for b in net.buffers()), sum(2 * p.nbytes for p in idle.parameters())
    assert expected + later - buffers <= found.forward_backward_bytes <= expected + later
    assert found.gradients_bytes == sum(p.nbytes for p in [*net.body.parameters(), *idle.parameters()])


def test_a_probe_counts_gradients_that_its_batch_gave_to_none():
    """An expert that had no sample."""
    net, idle = Net(), nn.Linear(32, 64)
    both = nn.ModuleList([net, idle])
    run = lambda: net(data())  # noqa: E731
    alone, found = (probe_footprint(one, run_micro_batch=run, run_validation_batch=run) for one in (net, both))
    weights = gradients = sum(p.nbytes for p in idle.parameters())
    assert found.gradients_bytes == alone.gradients_bytes + gradients
    assert found.resident_bytes == alone.resident_bytes + weights + gradients
    assert found.forward_backward_bytes == alone.forward_backward_bytes + weights + gradients
    for before, after in zip(alone.intervals, found.intervals, strict=True):
        assert after == replace(before, num_bytes=before.num_bytes + weights + gradients)


def test_a_first_step_that_releases_gradients_keeps_the_most_of_any_block():
    """The first block is stepped beside both gradients and the activations, the second beside less."""
    net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    first, second = net.parameters()
    memory = FirstStepMemory([first, second])
    first.grad, second.grad = torch.ones(64, 64), torch.ones(64, 64)
    activations = torch.ones(64, 64)
    memory.record_block_step()
    del activations
    second.grad = None
    memory.record_block_step()
    first.grad = None
    footprint = memory.finish(state_bytes=0)
    assert footprint.gradients_bytes == 2 * 64 * 64 * F32
    assert footprint.resident_bytes == 5 * 64 * 64 * F32
    assert footprint.forward_backward_bytes >= footprint.resident_bytes and footprint.released
    assert footprint.context_bytes == 0


@pytest.mark.parametrize("released", [False, True])
def test_states_that_were_there_all_the_time_are_no_part_of_a_first_step(released: bool):
    found = []
    for held in (0, 1000):
        net, states = nn.Linear(64, 64), torch.ones(held)
        memory = FirstStepMemory(list(net.parameters()), existing=[states])
        net(torch.ones(8, 64)).sum().backward()
        if released:
            memory.record_block_step()
        found.append(memory.finish(state_bytes=4 * held))
    assert found[0] == found[1] and found[0].resident_bytes > 2 * 64 * 64 * F32


def test_a_first_step_that_was_stopped_or_has_no_parameters():
    memory = FirstStepMemory([])
    assert memory.finish(state_bytes=0).device == "cpu"
    stopped = FirstStepMemory([torch.zeros(3)])
    stopped.stop()
    with pytest.raises(AssertionError, match=r"^the first step was finished before"):
        stopped.finish(state_bytes=0)


def test_a_step_that_needs_nothing_has_no_temporaries_and_is_run_twice():
    steps: list[None] = []
    assert step_temporary_bytes(lambda: lambda: steps.append(None), device="cpu") == 0
    assert len(steps) == 2


def test_temporaries_of_small_steps_are_measured_in_one_thread_and_threads_are_as_before(
    monkeypatch: pytest.MonkeyPatch,
):
    """On a busy machine threads wait for each other longer than such a step takes."""
    seen: list[int] = []
    monkeypatch.setattr(module, "measured_temporary_bytes", lambda *_: seen.append(torch.get_num_threads()) or 8)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert step_temporaries([SPECS["adamw"]], params=[torch.zeros(512, 256)]) == {"adamw": 16}
        assert seen == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(64, 64), (32, 24, 3, 3), (16, 300), (100, 130)])
@pytest.mark.parametrize("name", ["muon", "muon_int8+split8"])
def test_a_step_on_matrices_takes_what_is_predicted_whatever_their_shape(name: str, shape: tuple[int, ...]):
    def probe() -> Callable[[], None]:
        param = nn.Parameter(torch.ones(shape))
        param.grad = torch.randn(shape)
        optimizer = BlockwiseOptimizer([param], SPECS[name], backend="eager")
        return lambda: optimizer.step() and None

    found = step_temporary_bytes(probe, device="cpu")
    told = step_temporaries([SPECS[name]], params=[torch.zeros(8), torch.zeros(4, 4), torch.zeros(shape)])[name]
    assert abs(told - found) <= 64  # numbers of a step are no tensors on meta


def test_a_matrix_behind_a_dimension_of_one_is_predicted_as_the_matrix_that_is_stepped():
    beside = [torch.zeros(2, 1600), torch.zeros(1, 64, 48)]  # the first has more elements, and a shorter side of 2
    told = step_temporaries([SPECS["muon"]], params=beside)
    assert told == step_temporaries([SPECS["muon"]], params=[torch.zeros(64, 48)])
    assert told["muon"] > step_temporaries([SPECS["muon"]], params=beside[:1])["muon"]


@pytest.mark.parametrize("card", CARDS)
def test_an_absent_card_has_the_gaps_of_a_present_one(card: str):
    net, x = Net(), data()
    here = probe_footprint(net, run_micro_batch=lambda: net(x))
    here = replace(here, resident_bytes=64 * MIB, step_temporary_bytes={"adamw": 8 * MIB})
    cpu, cuda, absent = (
        replace(here, device=device).peak_bytes(state_bytes=0, specs=("adamw",)) for device in ("cpu", "cuda", card)
    )
    assert absent == cuda == cpu + 8 * MIB


def test_what_a_footprint_says_of_how_it_was_made():
    net, x = Net(), data()
    plain = probe_footprint(net, run_micro_batch=lambda: net(x), context_bytes=7)
    assert (plain.micro_batch, plain.context_bytes, plain.reserve_bytes, plain.released) == (0, 7, SCALARS_BYTES, False)
    assert plain.validation_bytes == 0 and {one.name for one in plain.intervals} <= {"training", "first"}
    trained = [name for name, param in net.named_parameters() if param.requires_grad]
    assert sorted(plain.gradient_order) == sorted(trained) and plain.gradient_order[-1] == "body.0.weight"
    looked = probe_footprint(net, run_micro_batch=lambda: net(x), run_validation_batch=lambda: net(x), micro_batch=5)
    assert {one.gradients for one in looked.intervals if one.name == "validation"} == {None}
    assert looked.micro_batch == 5 and looked.validation_bytes == max(
        one.num_bytes for one in looked.intervals if one.name == "validation"
    )
    own = probe_footprint(net, run_micro_batch=lambda: net(x).backward(), run_validation_batch=lambda: net(x))
    assert own.intervals == own.gradient_order == () and own.validation_bytes > 0
    leaf = probe_footprint(net, run_micro_batch=lambda: (net(x).backward(), net.body[0].bias)[1])
    assert leaf.intervals == () and leaf.forward_backward_bytes == own.forward_backward_bytes
    nameless = probe_footprint(list(net.parameters()), run_micro_batch=lambda: net(x))
    assert nameless.intervals == () and nameless.gradients_bytes == plain.gradients_bytes


def test_a_probe_of_released_gradients_tells_no_intervals():
    net, x = Net(), data()
    blocks = [
        [net.body[0].weight, net.body[0].bias],
        [net.body[1].weight, net.body[1].bias],
        [*net.body[4].parameters()],
    ]
    found = probe_footprint(net, run_micro_batch=lambda: net(x), released_blocks=blocks)
    assert found.released and found.intervals == found.gradient_order == ()
    most = max(sum(param.nbytes for param in block) for block in blocks)
    assert most <= found.gradients_bytes < sum(p.nbytes for p in net.parameters() if p.requires_grad)
    assert found.weights_bytes + most < found.resident_bytes <= found.forward_backward_bytes


def test_a_probe_that_leaves_no_gradient_is_told():
    net = Net()
    with pytest.raises(BadInputError, match=r"^no parameter has a gradient"):
        probe_footprint([], run_micro_batch=lambda: None)
    with pytest.raises(BadInputError, match=r"^no parameter has a gradient after the probe: it must run forward and"):
        probe_footprint(net, run_micro_batch=lambda: None)


def test_fake_tensors_are_run_once_beside_zero_gradients_and_show_every_stretch():
    net, x = Net(), data()
    warm = probe_footprint(net, run_micro_batch=lambda: net(x))
    cold = probe_footprint(net, run_micro_batch=lambda: net(x), warm=False)
    assert replace(cold, intervals=()) == replace(warm, intervals=())
    raw = probe_footprint(net, run_micro_batch=lambda: net(x), warm=False, merge_intervals=False)
    events = [interval.name for interval in raw.intervals if interval.name != "first"]
    assert events[0] == "dropped" and events[-1] == "ended" and raw.intervals[0].gradients is None
    assert [event for event in events if event.startswith("arrived ")] == [f"arrived {n}" for n in raw.gradient_order]
    assert all(param.grad is None for param in net.frozen.parameters())


def test_an_emulated_card_reserves_whole_pages():
    net, x = Net(), data()
    plain = probe_footprint(net, run_micro_batch=lambda: net(x), warm=False)
    emulated = probe_footprint(net, run_micro_batch=lambda: net(x), warm=False, allocator=CachingAllocator())
    assert emulated.forward_backward_bytes == 2 * MIB > plain.forward_backward_bytes
    assert max(interval.num_bytes for interval in emulated.intervals) == 2 * MIB


@pytest.mark.parametrize(("device", "reserve"), [("cpu", 16 * KIB), ("cuda", LATE_MODULES_BYTES + 44 * MIB + 20 * MIB)])
def test_a_card_keeps_room_for_late_kernels_pages_and_gaps(device: str, reserve: int):
    assert memory_reserve_bytes(torch.device(device), peak=1000 * MIB) == reserve


def test_weights_that_nothing_uses_count_and_all_may_be_trained():
    net, x = Net().requires_grad_(True), data()
    footprint = probe_footprint(net, run_micro_batch=lambda: net(x))
    assert footprint.forward_backward_bytes == tracked_peak(net, x, "forward_first")[0]
    net.unused = nn.Parameter(torch.zeros(1000), requires_grad=False)
    more = probe_footprint(net, run_micro_batch=lambda: net(x))
    assert more.forward_backward_bytes == footprint.forward_backward_bytes + 4000


def test_a_first_micro_batch_that_needs_more_is_a_stretch_of_its_own():
    net, x, calls = Net(), data(), []

    def run() -> Tensor:
        calls.append(torch.zeros(0 if calls else 100_000).sum())
        return net(x)

    last = probe_footprint(net, run_micro_batch=run).intervals[-1]
    assert last.name == "first" and last.gradients == 0 and last.num_bytes > 400_000
    calls.clear()
    assert probe_footprint(net, run_micro_batch=run).forward_backward_bytes == last.num_bytes


def test_gradients_that_wait_on_a_card_are_there_at_every_moment(monkeypatch: pytest.MonkeyPatch):
    net, x = Net(), data()
    trained = sum(param.nbytes for param in net.parameters() if param.requires_grad)
    assert waiting_gradient_bytes(torch.device("cuda"), list(net.parameters())) == grouped_bytes(trained) > 0
    given = {"run_micro_batch": lambda: net(x), "released_blocks": [list(net.body.parameters())]}
    monkeypatch.setattr(module_of_footprints, "memory_reserve_bytes", lambda device, peak: peak)
    before, kept = probe_footprint(net, **given), probe_footprint(net, run_micro_batch=lambda: net(x))
    monkeypatch.setattr(module_of_footprints, "waiting_gradient_bytes", lambda device, params: 1000 * bool(len(params)))
    more, still = probe_footprint(net, **given), probe_footprint(net, run_micro_batch=lambda: net(x))
    for part in ("gradients_bytes", "forward_backward_bytes", "resident_bytes", "reserve_bytes"):
        assert getattr(more, part) == getattr(before, part) + 1000 and getattr(still, part) == getattr(kept, part)
    assert kept.reserve_bytes == kept.forward_backward_bytes
    memory = FirstStepMemory([torch.zeros(100)])
    assert memory.finish(state_bytes=0).reserve_bytes == 400


def test_what_an_emulated_card_reserves_for_a_second_step_is_part_of_the_peak(monkeypatch: pytest.MonkeyPatch):
    net, x, seen = Net(), data(), []
    again = lambda self, gradients: seen.append(dict(gradients)) or 10 * MIB  # noqa: E731
    monkeypatch.setattr(CachingAllocator, "reserved_by_two_passes", again)
    cold = probe_footprint(net, run_micro_batch=lambda: net(x), warm=False, allocator=CachingAllocator())
    assert cold.forward_backward_bytes == 10 * MIB and sum(seen[0].values()) == cold.gradients_bytes
    assert probe_footprint(net, run_micro_batch=lambda: net(x)).forward_backward_bytes < 10 * MIB
