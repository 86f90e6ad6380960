"""Lines through timings, with a clock of our own: fit, medians, time limit, cache; and the table that specs get."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baoc.core.catalogue import SPECS
from baoc.profiling import latency
from baoc.profiling import step_time as timing
from baoc.profiling.latency import NUM_SMALL, SMALL_NUMEL, fit_step_cost, measure_latency, seconds_per_run, source_hash
from baoc.profiling.step_time import specs_timed_first, time_specs

LARGE = latency.LARGE_NUMEL["cpu"]


class Machine:
    """A clock, and steps that take once + per_tensor x tensors + per_element x elements seconds of it."""

    def __init__(self):
        self.now = 0.0
        self.runs: dict[str, int] = {}

    def clock(self) -> float:
        return self.now

    def step(
        self,
        name: str,
        *,
        once: float = 0.0,
        per_tensor: float = 0.0,
        per_element: float = 0.0,
        noise: tuple[float, ...] = (0.0,),
    ):
        def make(numel: int, tensors: int):
            def run() -> None:
                count = self.runs[name] = self.runs.get(name, 0) + 1
                self.now += once + (per_tensor + per_element * numel) * tensors + noise[count % len(noise)]

            return run

        return make


def test_three_points_make_a_line_that_is_never_negative():
    line = fit_step_cost(
        small_s=3 + 2 + SMALL_NUMEL * 1e-3,
        many_s=3 + NUM_SMALL * (2 + SMALL_NUMEL * 1e-3),
        large_s=5 + LARGE * 1e-3,
        large=LARGE,
    )
    assert (line.step_s, line.tensor_s, line.element_s) == pytest.approx((3, 2, 1e-3))
    odd = fit_step_cost(small_s=3.0, many_s=1.0, large_s=2.0, large=LARGE)
    assert (odd.step_s, odd.tensor_s, odd.element_s) == (3.0, 0.0, 0.0), "larger ones were faster: all of it is fixed"


def test_seconds_per_step_per_tensor_and_per_element_are_found():
    machine = Machine()
    steps = {
        "fast": machine.step("fast", once=1e-4, per_tensor=1e-5, per_element=1e-9),
        "slow": machine.step("slow", once=1e-4, per_tensor=1e-3),
    }
    table = measure_latency(steps, clock=machine.clock)
    assert table.fixed_s == pytest.approx({"fast": 1e-5, "slow": 1e-3})
    assert table.step_s == pytest.approx(1e-4)
    assert table.per_element_s["fast"] == pytest.approx(1e-9)
    assert table.per_element_s["slow"] == pytest.approx(0.0, abs=1e-12)
    assert table.base_step_s == table.reference_step_s == 0.0 and table.assumed == ()
    assert table.device.startswith("cpu")


def test_the_median_forgets_outliers_and_the_first_run():
    machine = Machine()
    noisy = machine.step("noisy", per_tensor=1e-3, noise=(0.0, 5e-2, 0.0, 0.0))  # runs 1, 5, 9, 13
    table = measure_latency({"noisy": noisy}, clock=machine.clock)
    assert table.fixed_s["noisy"] == pytest.approx(1e-3)


def test_a_series_forgets_what_came_once():
    machine = Machine()
    base = machine.step("base", once=0.02, noise=(0.0, 0.0, 0.0, 9.0))
    assert seconds_per_run(base(0, 0), device=torch.device("cpu"), max_s=1, clock=machine.clock) == pytest.approx(0.02)
    few = seconds_per_run(machine.step("few", once=5.0)(0, 0), device=torch.device("cpu"), max_s=1, clock=machine.clock)
    assert few == pytest.approx(5.0) and machine.runs["few"] == 3


@pytest.mark.parametrize("seconds", [1e-3, 0.2, 1.0])
def test_time_is_shared_and_every_step_runs_twice_at_least(seconds: float):
    machine = Machine()
    names = [f"spec{i}" for i in range(4)]
    measure_latency({name: machine.step(name, once=seconds) for name in names}, max_s=5.0, clock=machine.clock)
    assert all(machine.runs[name] >= 6 for name in names)
    assert machine.now <= max(5.0, 4 * 6 * seconds) + seconds
    assert machine.now == pytest.approx(sum(machine.runs.values()) * seconds)


def test_a_second_plan_reads_what_the_first_has_timed(tmp_path: Path):
    machine = Machine()
    steps = {name: machine.step(name, per_tensor=0.01) for name in ("a", "b")}
    first = measure_latency({"a": steps["a"]}, cache_dir=tmp_path, clock=machine.clock)
    runs = machine.runs["a"]
    both = measure_latency(steps, cache_dir=tmp_path, clock=machine.clock)
    assert machine.runs["a"] == runs
    assert machine.runs["b"] > 0
    assert both.fixed_s["a"] == first.fixed_s["a"]
    (path,) = tmp_path.iterdir()
    assert set(json.loads(path.read_text())["lines"]) == {"a", "b"}, "one file, and no draft beside it"


def test_a_line_is_told_by_smaller_tensors_where_memory_is_short_and_is_of_no_use_to_others(tmp_path: Path):
    machine, asked = Machine(), []
    plain = machine.step("a", once=1e-4, per_element=1e-9)

    def short(numel: int, tensors: int) -> Callable[[], None]:
        asked.append(numel)
        if numel >= LARGE:
            raise torch.OutOfMemoryError("full")
        return plain(numel, tensors)

    table = measure_latency({"a": short, "b": plain}, clock=machine.clock, cache_dir=tmp_path)
    assert asked == [SMALL_NUMEL, SMALL_NUMEL, LARGE, LARGE // 4]
    assert table.per_element_s["a"] == pytest.approx(1e-9)
    (path,) = tmp_path.iterdir()
    assert set(json.loads(path.read_text())["lines"]) == {"b"}


@pytest.mark.parametrize("broken", ['{"key": ', "[]", '{"key": 1}', "NaN"])
def test_other_versions_and_unreadable_files_are_timed_again(tmp_path: Path, monkeypatch, broken: str):
    machine = Machine()
    steps = {"a": machine.step("a", once=0.01)}
    measure_latency(steps, cache_dir=tmp_path, clock=machine.clock)
    runs = machine.runs["a"]
    monkeypatch.setattr(latency.torch, "__version__", "9.9")
    measure_latency(steps, cache_dir=tmp_path, clock=machine.clock)
    assert machine.runs["a"] == 2 * runs
    monkeypatch.undo()
    for path in tmp_path.iterdir():
        path.write_text(broken)
    measure_latency(steps, cache_dir=tmp_path, clock=machine.clock)
    assert machine.runs["a"] == 3 * runs
    for path in tmp_path.iterdir():  # what another user could have written
        path.chmod(0o666)
    measure_latency(steps, cache_dir=tmp_path, clock=machine.clock)
    assert machine.runs["a"] == 4 * runs


@pytest.mark.parametrize("line", [[1.0, 2.0], [1.0, -2.0, 0.0], ["x", 1, 1], [1.0, 1.0, float("inf")], None])
def test_a_line_that_is_no_line_is_timed_again(tmp_path: Path, line: object):
    machine = Machine()
    measure_latency({"a": machine.step("a", once=0.01)}, cache_dir=tmp_path, clock=machine.clock)
    (path,) = tmp_path.iterdir()
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "lines": {"a": line}}))
    runs = machine.runs["a"]
    table = measure_latency({"a": machine.step("a", once=0.01)}, cache_dir=tmp_path, clock=machine.clock)
    assert machine.runs["a"] == 2 * runs and table.step_s == pytest.approx(0.01)


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    machine = Machine()
    table = measure_latency(
        {"a": machine.step("a", once=0.01)}, cache_dir=tmp_path / "file" / "below", clock=machine.clock
    )
    assert table.step_s == pytest.approx(0.01)


def test_a_change_of_what_steps_is_another_source(tmp_path: Path):
    (tmp_path / "a.py").write_text("x = 1\n")
    before = source_hash([tmp_path])
    assert source_hash([tmp_path]) == before
    (tmp_path / "a.py").write_text("x = 2\n")
    assert source_hash([tmp_path]) != before
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert source_hash([tmp_path]) not in (before, "")


def test_specs_and_fused_adamw_are_timed_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Steps are real ones; their seconds are the machine's."""
    machine, cpu = Machine(), torch.device("cpu")

    def timed(steps: dict[str, latency.MakeStep], **given: Any) -> latency.LatencyTable:
        def ticking(name: str) -> latency.MakeStep:
            ticks = machine.step(name, once=1e-4, per_tensor=1e-5, per_element=1e-9)

            def make(numel: int, tensors: int) -> Callable[[], None]:
                step, tick = steps[name](numel, tensors), ticks(numel, tensors)

                def run() -> None:
                    step()
                    tick()

                return run

            return make

        return measure_latency({name: ticking(name) for name in steps}, clock=machine.clock, **given)

    monkeypatch.setattr(timing, "measure_latency", timed)
    specs = [SPECS["adamw"], SPECS["sign+bf16_sr"]]
    options: dict[str, Any] = {"device": cpu, "num_elements": 1000, "num_tensors": 3, "cache_dir": tmp_path}
    assert specs_timed_first(specs, device=cpu) == {"adamw", "sign+bf16_sr"}
    part = time_specs(specs, needed={"adamw"}, max_s=0.2, **options)
    assert set(part.fixed_s) == {"adamw", "sign+bf16_sr"} and part.assumed == ("sign+bf16_sr",)
    assert part.reference_step_s == pytest.approx(1e-4 + 3 * 1e-5 + 1000 * 1e-9)
    assert part.per_element_s["adamw"] == pytest.approx(1e-9)
    runs = machine.runs["adamw"]
    whole = time_specs(specs, needed={"sign+bf16_sr"}, max_s=0.2, **options)
    assert whole.assumed == () and machine.runs["adamw"] == runs, "known from before"


def test_kernels_that_are_not_needed_are_assumed_as_fast_by_the_byte_as_fused_adamw(monkeypatch):
    """On CUDA each kernel that is timed has to be compiled first; what has no kernel needs none."""
    timed: list[str] = []

    def fake(steps, *, device, max_s, cache_dir):
        timed.extend(steps)
        lines = {name: 2e-12 if name == timing.FUSED else 5e-12 for name in steps}
        return latency.LatencyTable(device="card", fixed_s=dict.fromkeys(steps, 1e-6), per_element_s=lines, step_s=1e-5)

    monkeypatch.setattr(timing, "measure_latency", fake)
    monkeypatch.setattr(timing, "timing_key", lambda device: {})
    specs, cuda = [SPECS[name] for name in ("adamw", "adamw_int8", "sign", "muon")], torch.device("cuda")
    needed = specs_timed_first(specs, device=cuda) | {"adamw_int8"}
    table = time_specs(
        specs, device=cuda, num_elements=10**9, num_tensors=100, needed=needed, upkeep_bytes=14, rest_s=0.2
    )
    assert timed == [timing.FUSED, "adamw_int8", "muon"] and table.assumed == ("adamw", "sign")
    assert table.per_element_s["adamw"] == pytest.approx(2e-12, rel=1e-3)
    assert table.per_element_s["sign"] == pytest.approx(2e-12 * 12 / 28, rel=1e-3)  # weight twice and gradient
    assert table.per_element_s["adamw_int8"] == 5e-12
    assert table.base_step_s == pytest.approx(0.2 + 1e-3)
    assert table.reference_step_s == pytest.approx(0.2 + 1e-3 + 1e-5 + 100 * 1e-6 + 2e-3)
