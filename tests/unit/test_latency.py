"""Lines through timings, with a clock of our own: fit, medians, time limit, cache."""

import json

import pytest

from baoc.profiling import latency
from baoc.profiling.latency import fit_line, measure_latency


class Machine:
    """A clock, and steps that take fixed + per_element x numel seconds of it."""

    def __init__(self):
        self.now = 0.0
        self.runs: dict[str, int] = {}

    def clock(self) -> float:
        return self.now

    def step(self, name: str, *, fixed: float, per_element: float = 0.0, noise: tuple[float, ...] = (0.0,)):
        def make(numel: int):
            def run() -> None:
                count = self.runs[name] = self.runs.get(name, 0) + 1
                self.now += fixed + per_element * numel + noise[count % len(noise)]

            return run

        return make


def test_two_points_make_a_line_that_is_never_negative():
    assert fit_line((10, 110), (2.0, 3.0)) == pytest.approx((1.9, 0.01))
    assert fit_line((10, 110), (3.0, 2.0)) == (3.0, 0.0), "the larger block was faster: all of it is fixed"
    assert fit_line((10, 20), (1.0, 3.0)) == (0.0, 0.2)


def test_fixed_and_per_element_seconds_are_found():
    machine = Machine()
    steps = {"fast": machine.step("fast", fixed=1e-4, per_element=1e-9), "slow": machine.step("slow", fixed=1e-3)}
    table = measure_latency(steps, clock=machine.clock)
    assert table.fixed_s == pytest.approx({"fast": 1e-4, "slow": 1e-3})
    assert table.per_element_s["fast"] == pytest.approx(1e-9)
    assert table.per_element_s["slow"] == pytest.approx(0.0, abs=1e-12)
    assert table.base_step_s == table.reference_step_s == 0.0
    assert table.device.startswith("cpu")


def test_the_median_forgets_outliers_and_the_first_run():
    machine = Machine()
    noisy = machine.step("noisy", fixed=1e-3, noise=(0.0, 5e-2, 0.0, 0.0))  # runs 1, 5, 9, 13
    table = measure_latency({"noisy": noisy}, clock=machine.clock)
    assert table.fixed_s["noisy"] == pytest.approx(1e-3)


def test_whole_steps_are_timed_where_given():
    machine = Machine()
    table = measure_latency(
        {},
        clock=machine.clock,
        base_step=machine.step("base", fixed=0.02)(0),
        reference_step=machine.step("reference", fixed=0.03)(0),
    )
    assert (table.base_step_s, table.reference_step_s) == pytest.approx((0.02, 0.03))


@pytest.mark.parametrize("seconds", [1e-3, 0.2, 1.0])
def test_time_is_shared_and_every_step_runs_twice_at_least(seconds: float):
    machine = Machine()
    names = [f"spec{i}" for i in range(4)]
    measure_latency({name: machine.step(name, fixed=seconds) for name in names}, max_s=5.0, clock=machine.clock)
    assert all(machine.runs[name] >= 4 for name in names)
    assert machine.now <= max(5.0, 4 * 4 * seconds) + seconds
    assert machine.now == pytest.approx(sum(machine.runs.values()) * seconds)


def test_a_second_plan_reads_what_the_first_has_timed(tmp_path):
    machine = Machine()
    steps = {name: machine.step(name, fixed=0.01) for name in ("a", "b")}
    first = measure_latency({"a": steps["a"]}, cache_dir=tmp_path, clock=machine.clock)
    runs = machine.runs["a"]
    both = measure_latency(steps, cache_dir=tmp_path, clock=machine.clock)
    assert machine.runs["a"] == runs
    assert machine.runs["b"] > 0
    assert both.fixed_s["a"] == first.fixed_s["a"]
    (path,) = tmp_path.iterdir()
    assert set(json.loads(path.read_text())["lines"]) == {"a", "b"}, "one file, and no draft beside it"


def test_other_versions_and_unreadable_files_are_timed_again(tmp_path, monkeypatch):
    machine = Machine()
    steps = {"a": machine.step("a", fixed=0.01)}
    measure_latency(steps, cache_dir=tmp_path, clock=machine.clock)
    runs = machine.runs["a"]
    monkeypatch.setattr(latency.torch, "__version__", "9.9")
    measure_latency(steps, cache_dir=tmp_path, clock=machine.clock)
    assert machine.runs["a"] == 2 * runs
    monkeypatch.undo()
    for path in tmp_path.iterdir():
        path.write_text('{"key": ')
    measure_latency(steps, cache_dir=tmp_path, clock=machine.clock)
    assert machine.runs["a"] == 3 * runs


def test_real_steps_are_timed_too():
    total = []
    table = measure_latency({"append": lambda numel: lambda: total.append(numel)}, max_s=0.2)
    assert 0 <= table.fixed_s["append"] < 0.1
    assert set(total) == set(latency.SIZES)
