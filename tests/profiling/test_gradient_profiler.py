"""When the profiler samples, what it holds and ignores, and that it goes on after a resume as if nothing happened."""

import pytest
import torch
from torch import Tensor, nn

from baoc.errors import CheckpointError
from baoc.profiling import GradientProfiler, MemoryTracker, schedule
from baoc.types import Profile, read_plain, to_plain
from baoc.units import MIB
from tests.support.gradients import Stream, make_block, make_params, normal

BLOCKS = [make_block("attn", (32, 16), (32, 16)), make_block("norm", (40,)), make_block("conv", (8, 4, 3, 3))]
SHAPES = {param.name: param.shape for block in BLOCKS for param in block.params}


def grads(step: int) -> dict[str, Tensor | None]:
    return {name: normal(*shape, seed=1000 * step + i) for i, (name, shape) in enumerate(SHAPES.items())}


def run(stream: Stream, steps: int) -> Stream:
    for _ in range(steps):
        stream.feed(grads(stream.step))
    return stream


def plain(stream: Stream) -> dict[str, object]:
    """The profile without its timings."""
    return {k: v for k, v in to_plain(stream.profile()).items() if not k.endswith("_s")}


def test_step_zero_is_never_sampled():
    blocks = [make_block("w", (4, 4))]
    params = make_params(blocks)
    profiler = GradientProfiler(blocks, params)
    params["w.0"].grad = torch.ones(4, 4)
    assert not profiler.observe()
    assert profiler.observe()
    assert profiler.num_samples == 1


def test_non_finite_elements_count_as_zero_and_poison_nothing():
    dirty, clean = Stream(BLOCKS), Stream(BLOCKS)
    for step in range(8):
        for stream, values in ((dirty, (float("nan"), float("inf"), -float("inf"))), (clean, (0.0, 0.0, 0.0))):
            found = grads(step)
            for name in ("attn.0", "norm.0"):
                grad = found[name]
                assert grad is not None
                grad.view(-1)[:3] = torch.tensor(values)
            stream.feed(found)
    assert plain(dirty) == plain(clean)
    assert all(moments.row.isfinite().all() for moments in dirty.profiler.second_moments().values())


def test_a_row_with_a_non_finite_element_keeps_its_moment():
    stream = Stream([make_block("w", (4, 8))])
    stream.feed({"w.0": torch.full((4, 8), 2.0)})
    bad = torch.full((4, 8), 2.0)
    bad[1, 3] = float("nan")
    stream.feed({"w.0": bad})
    moments = stream.profiler.second_moments()["w.0"]
    torch.testing.assert_close(moments.row, torch.full((4,), 4.0))
    torch.testing.assert_close(moments.col, torch.full((8,), 4.0))


def test_a_missing_gradient_counts_as_zero():
    missing, zero = Stream(BLOCKS), Stream(BLOCKS)
    for step in range(4):
        missing.feed(grads(step) | {"conv.0": None})
        zero.feed(grads(step) | {"conv.0": torch.zeros(SHAPES["conv.0"])})
    assert plain(missing) == plain(zero)


@pytest.mark.parametrize("transposed", [False, True])
def test_moments_are_means_by_row_and_column_of_the_whole_matrix(transposed: bool):
    """Whole, though the slice is small; of (fan_out, fan_in), however it is stored; bias-corrected averages."""
    stream = Stream([make_block("w", (64, 96), (7,), transposed=transposed)], max_bytes=6000)
    history = [normal(64, 96, seed=s) for s in range(3)]
    for grad in history:
        stream.feed({"w.0": grad, "w.1": torch.ones(7)})
    weights = torch.tensor([0.999**2, 0.999, 1.0]) * 0.001 / (1 - 0.999**3)
    mean = sum(w * g.square() for w, g in zip(weights, history, strict=True))
    assert isinstance(mean, Tensor)
    matrix = mean.t() if transposed else mean
    moments = stream.profiler.second_moments()
    assert set(moments) == {"w.0"}, "a vector has no rows"
    torch.testing.assert_close(moments["w.0"].row, matrix.mean(1))
    torch.testing.assert_close(moments["w.0"].col, matrix.mean(0))


@pytest.mark.parametrize("max_bytes", [100_000, 2 * MIB])
def test_bytes_stay_within_the_limit_and_are_those_of_the_live_tensors(max_bytes: int):
    blocks = [make_block(f"b{i}", (96, 64), (64, 96), (64,)) for i in range(6)]
    profiler = GradientProfiler(blocks, make_params(blocks), max_bytes=max_bytes)
    assert 0.2 * max_bytes < profiler.nbytes <= max_bytes or profiler.nbytes < max_bytes / 2
    assert profiler.nbytes == sum(t.untyped_storage().nbytes() for t in reachable(profiler).values())


def reachable(root: object) -> dict[int, Tensor]:
    """Storages' tensors that `root` holds, not counting parameters."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    todo = [root]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, nn.Parameter):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            found[value.untyped_storage()._cdata] = value
        elif isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, list | tuple):
            todo += value
        elif type(value).__module__.startswith("baoc.profiling"):
            todo += [getattr(value, name) for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)]
            todo += getattr(value, "__dict__", {}).values()
    return found


def test_default_limits_by_size():
    small = [make_block("w", (3000, 1000))]
    with torch.device("meta"):
        params = make_params(small)
    assert 12 * MIB < GradientProfiler(small, params).nbytes <= 16 * MIB
    large = [make_block(f"w{i}", (1000, 1000)) for i in range(20)]
    with torch.device("meta"):
        params = make_params(large)
    assert 0.15 * 20e6 < GradientProfiler(large, params).nbytes <= 0.2 * 20e6


def test_samples_thin_out_by_count_alone():
    stream = Stream([make_block("w", (2, 2))])
    sampled = [index for index in range(300) if stream.feed({"w.0": torch.ones(2, 2)})]
    assert sampled[:64] == list(range(64))
    assert sampled[64:96] == list(range(64, 128, 2))
    assert sampled[96:128] == list(range(128, 256, 4))
    assert sampled[128:] == list(range(256, 300, 8))


def test_each_of_thinned_samples_is_paired_with_the_step_before():
    direction = normal(64, 64, seed=0)
    stream = Stream([make_block("w", (64, 64))])
    sampled = [stream.feed({"w.0": direction + normal(64, 64, seed=i + 1)}) for i in range(140)]
    stats = stream.profile().stats["w"]
    assert stats.num_samples == sum(sampled) < 140
    assert stats.noise == pytest.approx(1 / float(direction.square().mean()), rel=0.1)


def test_below_ten_million_only_the_three_second_cap_looks_at_the_clock(monkeypatch):
    now = iter(range(10**6))
    monkeypatch.setattr(schedule, "thread_time", lambda: 0.25 * next(now))  # each sample takes .25 s
    stream = Stream([make_block("w", (2, 2))])
    sampled = [stream.feed({"w.0": torch.ones(2, 2)}) for _ in range(30)]
    assert sampled == [True] * 13 + [False] * 17, "over 3 s after the thirteenth, and not before"


class Clock:
    """Every reading takes .05 s, so a sample costs about that; `step` lets time go by."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        monkeypatch.setattr("baoc.profiling.gradients.LARGE_PARAMS", 1)
        monkeypatch.setattr(schedule, "LARGE_PARAMS", 1)
        monkeypatch.setattr(schedule, "perf_counter", self.read)

    def read(self) -> float:
        self.now += 0.05
        return self.now

    def wait(self, seconds: float) -> torch.Tensor:
        """Lets time go by; a gradient."""
        self.now += seconds
        return normal(64, 64, seed=int(1000 * self.now))


def test_from_ten_million_up_the_share_of_time_is_kept_and_samples_come_in_pairs(monkeypatch):
    now = Clock(monkeypatch)
    direction = normal(64, 64, seed=0)
    stream = Stream([make_block("w", (64, 64))], max_bytes=400_000)
    assert stream.profiler.num_samples == 0, "the rehearsal leaves no trace"
    sampled = []
    for step in range(300):
        now.now += 0.5
        sampled.append(stream.feed({"w.0": direction + normal(64, 64, seed=step + 1)}))
        if stream.profiler.num_samples >= 2 and step % 50 == 0:
            profile = stream.profile()
            assert profile.profile_s <= 0.05 * profile.warmup_s + 0.11, step
    stats = stream.profile().stats["w"]
    assert 15 <= sum(sampled) <= 150
    assert stats.noise == pytest.approx(1 / float(direction.square().mean()), rel=0.2), "each has the step before it"


def test_a_share_of_time_is_kept_where_costs_scatter(monkeypatch):
    """Every third sample takes four times as long as the others, and the one before it says nothing of that."""
    clock = {"now": 0.0}
    monkeypatch.setattr(schedule, "perf_counter", lambda: clock["now"])
    late = schedule.SamplingSchedule(num_params=schedule.LARGE_PARAMS)
    late.start()
    worst, taken = 0.0, 0
    for _ in range(4000):
        clock["now"] += 0.5
        turn = late.next_action()
        if turn is not schedule.SamplingAction.SKIP:
            taken += turn is schedule.SamplingAction.SAMPLE
            with late.timed(turn):
                clock["now"] += 0.04 if taken % 3 == 0 else 0.01
        late.advance(turn)
        worst = max(worst, late.spent_s / late.elapsed_s if taken > 9 else 0.0)
    assert taken > 100 and worst <= schedule.MAX_SHARE


def test_a_rehearsal_changes_nothing_but_what_is_known_of_the_cost(monkeypatch):
    Clock(monkeypatch)
    rehearsed = GradientProfiler(BLOCKS, params := make_params(BLOCKS), max_bytes=200_000)
    monkeypatch.undo()
    plain_one = GradientProfiler(BLOCKS, params, max_bytes=200_000)
    mine, theirs = rehearsed.state_dict(), plain_one.state_dict()
    assert all(torch.equal(mine["tensors"][name], tensor) for name, tensor in theirs["tensors"].items())
    assert mine["count"] == theirs["count"]
    assert all(param.grad is None for param in params.values())


@pytest.mark.parametrize("split", [1, 7, 20])
def test_resumed_profiling_is_the_same_bit_for_bit(split: int, tmp_path):
    whole = run(Stream(BLOCKS), 25)
    first = run(Stream(BLOCKS), split)
    torch.save(first.profiler.state_dict(), tmp_path / "state.pt")
    second = Stream(BLOCKS)
    second.profiler.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    second.step = first.step
    run(first, 3)  # what was saved is a copy
    run(second, 25 - split)
    assert plain(second) == plain(whole)
    mine, theirs = second.profiler.second_moments(), whole.profiler.second_moments()
    assert all(torch.equal(mine[name].row, theirs[name].row) for name in theirs)


def test_state_of_an_earlier_version_that_kept_more_sums_is_continued():
    blocks = [make_block("w", (16, 16))]
    stream, resumed = Stream(blocks), Stream(blocks)
    for step in range(4):
        stream.feed({"w.0": normal(16, 16, seed=step)})
    state = stream.profiler.state_dict()
    state["tensors"]["update"] = torch.ones(len(state["tensors"]["energy"]), dtype=torch.float64)
    state["tensors"]["folds"] = state["tensors"]["folds"].repeat(1, 2) + torch.tensor([0.0] * 4 + [1.0] * 4)
    resumed.profiler.load_state_dict(state)
    stats = to_plain(resumed.profile().stats)
    assert stats == to_plain(stream.profile().stats)
    earlier = {"w": {**stats["w"], "grad_rms": 1e-3, "update_rms": 0.2}}
    assert to_plain(read_plain(Profile, {"stats": earlier}, partial=True).stats) == stats


def test_state_of_other_blocks_is_refused():
    state = run(Stream(BLOCKS), 3).profiler.state_dict()
    with pytest.raises(
        CheckpointError, match="of other blocks or parameters than this run's: resume with the same model"
    ):
        Stream(BLOCKS[:1]).profiler.load_state_dict(state)


def test_the_same_stream_gives_the_same_profile_twice():
    first, second = (run(Stream(BLOCKS), 12) for _ in range(2))
    assert plain(first) == plain(second)


def test_a_profile_survives_json_and_one_of_an_earlier_version_is_read():
    plain = to_plain(run(Stream(BLOCKS), 12).profile())
    assert to_plain(read_plain(Profile, {**plain, "shadow": {"attn": {"sign": {"cosine": 0.1}}}})) == plain


def test_observing_changes_neither_gradients_nor_rng():
    stream = Stream(BLOCKS)
    found = grads(1)
    kept = {name: grad.clone() for name, grad in found.items() if grad is not None}
    state = torch.get_rng_state()
    stream.feed(found)
    stream.profile()
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(kept[name], grad) for name, grad in found.items() if grad is not None)


def test_release_frees_every_buffer_and_ends_sampling():
    stream = run(Stream(BLOCKS), 5)
    stream.profiler.free()
    assert stream.profiler.nbytes == 0
    assert sum(tensor.nbytes for tensor in reachable(stream.profiler).values()) < 3000, "index tensors at most"
    assert not stream.feed(grads(9))
    assert stream.profiler.state_dict() == {}


def test_bf16_gradients_are_averaged_in_fp32():
    stream = Stream([make_block("w", (16, 16))])
    for name in stream.params:
        stream.params[name] = nn.Parameter(stream.params[name].bfloat16())
    stream.profiler = GradientProfiler(stream.blocks, stream.params)
    stream.profiler.observe(step=0)
    for i in range(30):
        stream.feed({"w.0": normal(16, 16, seed=i).bfloat16()})
    exact = Stream([make_block("w", (16, 16))])
    for i in range(30):
        exact.feed({"w.0": normal(16, 16, seed=i).bfloat16().float()})
    assert plain(stream) == plain(exact)


LARGE = [make_block("one", (1024, 512)), make_block("many", *[(64, 96) for _ in range(8)]), make_block("v", (5000,))]


def test_samples_and_profiles_hold_no_more_than_was_charged_for_them(monkeypatch: pytest.MonkeyPatch):
    """Under a clock that stands still: a busy machine takes more than the processor seconds that sampling may have."""
    monkeypatch.setattr(schedule, "thread_time", lambda: 0.0)
    stream = Stream(LARGE)
    profiler = stream.profiler
    charged, held = profiler.temporary_bytes(), [*profiler.buffers(), *stream.params.values()]
    tracker = MemoryTracker()
    for step in range(1, 7):
        stream.set({p.name: normal(*p.shape, seed=step) for block in LARGE for p in block.params})
        tracker.count_existing(held, [param.grad for param in stream.params.values()])
        with tracker:
            tracker.reset_peak()
            before = tracker.current_bytes
            assert profiler.observe(step=step)
            profiler.profile()
            profiler.second_moments()
            assert tracker.peak_bytes - before <= charged
    assert charged < 0.85 * profiler.nbytes, "no copy of all that is sampled"


def test_a_profile_is_made_by_bands():
    stream = run(Stream(BLOCKS), 3)
    large = Stream(LARGE)
    for step in range(1, 4):
        large.feed({p.name: normal(*p.shape, seed=step) for block in LARGE for p in block.params})
    for one in (stream, large):
        tracker = MemoryTracker().count_existing(one.profiler.buffers())
        with tracker:
            before = tracker.current_bytes
            one.profile()
        assert tracker.peak_bytes - before < 2**20 + one.profiler.nbytes / 4


def test_a_state_that_is_written_at_once_is_no_copy():
    profiler = run(Stream(BLOCKS), 3).profiler
    held = {tensor.data_ptr() for tensor in profiler.buffers()}
    for copies in (False, True):
        state = profiler.state_dict(copies=copies)
        saved = [*state["tensors"].values(), state["moments"]["average"]]
        assert all((tensor.data_ptr() in held) is not copies for tensor in saved if tensor.numel())
