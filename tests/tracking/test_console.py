"""What is printed: readable at 100 columns, plain where there is no terminal, and true to the values it is given."""

import io
import math
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
from rich.console import Console

from baoc.tracking import console
from baoc.tracking.rows import collapsed_rows, plan_rows
from baoc.training.run import quieten
from baoc.types import (
    Allocation,
    Basis,
    BlockMove,
    Budget,
    FailedRun,
    ImageDataSpec,
    Option,
    Plan,
    Reallocation,
    Reason,
    TextDataSpec,
)
from baoc.units import GIB, MIB
from tests.support.paths import ROOT
from tests.support.values import block, make_plan, make_result, point
from tests.support.waiting import PATIENCE_S


def test_a_plan_says_block_spec_bytes_risk_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_plan(make_plan(), title="At the start")
    out = capsys.readouterr().out
    assert out.startswith("At the start")
    (mlp,) = [line for line in out.splitlines() if line.startswith(" layers.1.mlp")]
    assert mlp.split()[1:] == ["sign", "8", "B", "0.5", "adamw:", "+252", "B,", "risk", "-0.5"]
    (attention,) = [line for line in out.splitlines() if line.startswith(" layers.1.attention")]
    assert attention.split()[1:] == ["adamw", "260", "B", "0", "sign:", "-252", "B,", "risk", "+0.5", "(drop_m)"]
    assert "state 1.02 KiB (1048 bytes), 80.6% of fp32 AdamW's 1.27 KiB; risk 0.5 by risk=prior" in out
    assert "(allocator=exact, proven optimal)" in out
    assert "budget state_50 binds; budgets that bind go from 40 bytes (the least feasible) to 1.27 KiB" in out


def test_a_reader_that_has_gone_ends_no_run() -> None:
    """As in `python run.py | head`, or where the terminal of a run that goes on is closed."""
    program = (
        "import os, sys; from baoc.tracking import console; ends = os.pipe(); os.dup2(ends[1], 1); "
        "[os.close(end) for end in ends]; console.say('one'); console.say('two'); print('three', flush=True); "
        "sys.stderr.write('goes on')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stderr) == (0, "goes on")


def test_advice_for_other_loggers_is_not_shown() -> None:
    advice = "The number of training batches (5) is smaller than the logging interval Trainer(log_every_n_steps=10)."
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        quieten()
        warnings.warn(advice, stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["something else"]


def test_data_are_said_in_words() -> None:
    digits = ImageDataSpec(dataset="digits", image_size=8, channels=1, num_classes=10, num_train=1438, num_val=359)
    assert str(digits) == "digits, 1,438 images of 1 x 8 x 8 in 10 classes, 359 held back"
    text = TextDataSpec(dataset="mine", vocab_size=4096, sequence_length=128, num_train=0, num_val=512, sha256="ab")
    assert str(text) == "mine, a stream of sequences of 128 tokens out of 4,096, 512 held back"


def test_a_budget_that_does_not_bind_says_so_and_which_would(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_plan(make_plan(budget=Budget(name="8gb", memory_bytes=8 * GIB), binding=False, gap=0.25))
    out = capsys.readouterr().out
    assert "budget 8gb does not bind: nothing is given up; budgets that bind go from 40 bytes" in out
    assert "of device memory" in out and "predicted peak 5.00 MiB (5242880 bytes)" in out
    assert "gap 0.25" in out
    console.print_plan(make_plan(budget=Budget(name="unlimited"), binding=False))
    assert "no memory or state limit" in capsys.readouterr().out


def test_deep_plans_are_collapsed_and_their_sums_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(layers=20, cheap_from=3)
    rows = collapsed_rows(plan)
    assert [(row.block, row.spec, row.num_blocks) for row in rows] == [
        ("layers.{0-19}.attention", "adamw", 20),
        ("layers.{0-2}.mlp", "adamw", 3),
        ("layers.{3-19}.mlp", "sign", 17),
        ("head", "adamw", 1),
    ]
    assert sum(row.state_bytes or 0 for row in rows) == plan.allocation.state_bytes
    assert sum(row.num_params for row in rows) == sum(b.numel for b in plan.blocks)
    console.print_plan(plan)
    assert "(first of 17)" in capsys.readouterr().out


def test_blocks_are_not_collapsed_below_the_limit_nor_across_specs() -> None:
    plan = make_plan(layers=11)
    assert collapsed_rows(plan) == plan_rows(plan)
    gaps = collapsed_rows(make_plan(layers=13, cheap_from=0))
    assert [row.block for row in gaps] == ["layers.{0-12}.attention", "layers.{0-12}.mlp", "head"]


def test_a_layer_number_is_not_confused_with_others() -> None:
    blocks = [block(f"stage1.layers.{i}.mlp", depth=i) for i in range(25)]
    plan = make_plan()
    plan = Plan(
        **{name: getattr(plan, name) for name in plan.__slots__}
        | {
            "blocks": tuple(blocks),
            "candidates": {},
            "reasons": (),
            "allocation": Allocation(
                choices={b.name: "adamw" for b in blocks}, state_bytes=0, risk=0.0, allocator="exact"
            ),
        }
    )
    # Layer 1 shares its number with stage1, so it keeps a row of its own; nothing is summed up wrongly.
    assert sorted(row.num_blocks for row in collapsed_rows(plan)) == [1, 24]


def test_no_line_is_wider_than_100_columns_and_nothing_is_coloured(capsys: pytest.CaptureFixture[str]) -> None:
    long = "encoder.very.long.block.name.that.no.model.should.have.layers"
    plan = make_plan(layers=3)
    renamed = {b.name: f"{long}.{b.name}" for b in plan.blocks}
    plan = Plan(
        **{name: getattr(plan, name) for name in plan.__slots__}
        | {
            "blocks": tuple(block(renamed[b.name], depth=b.depth) for b in plan.blocks),
            "candidates": {},
            "allocation": Allocation(
                choices={name: "adamw_shared_out_int8" for name in renamed.values()},
                state_bytes=0,
                risk=0.0,
                allocator="exact",
            ),
            "reasons": tuple(
                Reason(block=name, spec="x", cheaper=None, dearer=None, text="nothing cheaper applies; " * 6)
                for name in renamed.values()
            ),
        }
    )
    console.print_plan(plan)
    table = capsys.readouterr().out.split("state 0 B")[0]
    assert max(map(len, table.splitlines())) <= 100
    assert not any(line.endswith(" ") for line in table.splitlines()), "no padding in a log"
    assert "\x1b" not in table
    assert "adamw_shared_out_int8" in table, "specs are not torn"


def test_reallocations_say_what_moved_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    move = BlockMove(block="a", source="adamw", target="sign", kept={"m": "dropped", "v": "dropped"})
    event = Reallocation(
        step=40,
        trigger="once",
        accepted=True,
        why="risk 2 -> 1",
        moves=(move,) * 30,
        state_bytes_before=2 * MIB,
        state_bytes_after=MIB,
        risk_before=2.0,
        risk_after=1.0,
    )
    console.print_reallocation(event)
    out = capsys.readouterr().out
    assert "step 40, reallocation (once): 30 blocks moved; risk 2 -> 1; state 2.00 MiB -> 1.00 MiB" in out
    assert "a: adamw -> sign (m dropped, v dropped)" in out and "and 6 more, in reallocations.jsonl" in out


def test_the_closing_summary_holds_peak_against_budget(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_result(make_result(), run_dir="outputs/x")
    out = " ".join(capsys.readouterr().out.split())
    for text in (
        "val/loss 0.1824 (lower is better)",
        "val/acc 0.953",
        "5.00 MiB (5242880 bytes), predicted 6.00 MiB",
        "8.00 GiB of device memory: met, 8.00 GiB to spare (does not bind)",
        "25.0% of fp32 AdamW's 4.00 MiB",
        "12.5 ms, 5,120 samples/s",
        "outputs/x",
    ):
        assert text in out


def test_a_peak_of_before_a_lower_budget_came_is_told_as_that(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_result(make_result(budget_bytes=MIB, peak_bytes=2 * MIB, budget_met=True), run_dir="outputs/x")
    out = " ".join(capsys.readouterr().out.split())
    assert "1.00 MiB of device memory: met, the peak is of an earlier, larger budget (does not bind)" in out


def test_a_budget_that_was_not_met_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    budget = {"kind": "state_fraction", "name": "state_25", "limit": 0.25}
    result = make_result(budget=budget, budget_bytes=MIB, state_bytes=2 * MIB, budget_met=False, binding=True)
    console.print_result(result, run_dir="x")
    assert "1.00 MiB of optimizer state: NOT met, 1.00 MiB over (binds)" in " ".join(capsys.readouterr().out.split())


def test_pairs_are_told_but_for_those_of_none(capsys: pytest.CaptureFixture[str]) -> None:
    budget = console.describe_budget(Budget(name="8gb", memory_bytes=8 * GIB, step_time=1.5))
    console.print_key_values("vit_8gb", {"budget": budget, "seed": None}, run_dir="outputs/x")
    out = " ".join(capsys.readouterr().out.split())
    assert "8gb: 8.00 GiB (8589934592 bytes) of device memory, 1.5 x the step time of fused AdamW" in out
    assert "run folder outputs/x" in out and "seed" not in out


def test_the_frontier_marks_points_and_gives_reasons_of_failed_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    untimed = {"samples_per_s": math.nan, "dominated": True}  # of a run too short to time a step
    points = [point("budget=state_50", num_seeds=3, quality_spread=0.012), point("budget=state_10", **untimed)]
    failed = FailedRun(run="2", label="budget=state_1", exit_code=3, message="budget cannot be met\nmore")
    console.print_frontier(points, failed=[failed], quality="val/loss")
    lines = capsys.readouterr().out.splitlines()
    (first,) = [line for line in lines if "state_50" in line]
    (second,) = [line for line in lines if "state_10" in line]
    assert first.split() == ["*", "budget=state_50", "0.18", "±0.012", "5.00", "MiB", "1.00", "MiB", "5,000", "3"]
    assert "*" not in second and second.split()[-2:] == ["-", "1"]
    assert any("budget=state_1 (2), exit code 3: budget cannot be met" in line for line in lines)


def test_of_many_runs_the_front_and_the_best_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    points = [point(f"budget=state_{n}", dominated=n > 30) for n in range(1, 51)]
    console.print_frontier([*points[:30], point("lr=9", quality=math.nan, dominated=False), *points[30:]])
    out = capsys.readouterr().out
    assert out.count("budget=state_") == 30 and "diverged" in out
    assert "; 20 dominated ones more in frontier.csv" in out


def test_a_measured_plan_has_no_column_of_risk_and_no_note_on_specs_that_it_does_not_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "the recipe's spec for hidden"
    reason = Reason(block="layers.1.mlp", spec="sign", cheaper=None, dearer=None, text=text)
    plan = replace(make_plan(), basis=Basis(by="measured", text="n 8"), reasons=(reason,))
    console.print_plan(plan)
    out = capsys.readouterr().out
    assert "risk" not in out and "dearer" not in out and text in out


def test_on_a_narrow_terminal_long_reasons_have_lines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    narrow = Console(file=out, width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr(console, "make_console", lambda: narrow)
    plan = make_plan()
    reasons = (Reason(block="layers.1.mlp", spec="sign", cheaper=None, dearer=None, text="because " * 12),)
    console.print_plan(replace(plan, reasons=reasons))
    lines = out.getvalue().splitlines()
    assert lines.count(next(line for line in lines if line.startswith("layers.1.mlp: because because"))) == 1
    assert max(map(len, lines)) <= 80
    assert not any(line.split() == ["block", "spec", "bytes", "risk", "why"] for line in lines)
    assert len(plan.allocation.choices) > 1 and not any(line.endswith(":") for line in lines)


def test_a_word_of_a_run_s_label_is_never_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    narrow = Console(file=out, width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr(console, "make_console", lambda: narrow)
    label = "allocator=uniform_adamw_shared_out_int8 budget=state_25"
    console.print_frontier([point("budget=8gb"), point(label, num_seeds=3, quality_spread=0.012)])
    lines = out.getvalue().splitlines()
    assert f"2: {label}" in map(str.strip, lines) and any(line.split()[:2] == ["*", "2"] for line in lines)
    assert max(map(len, lines)) <= 80


def test_text_goes_to_the_stdout_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A multirun's jobs and a progress bar put something else in the place of stdout after this module was loaded."""
    buffer = io.StringIO()
    monkeypatch.setattr(sys, "stdout", buffer)
    console.say("hello [bold]as it is[/bold] " + "x" * 150)
    assert buffer.getvalue() == "hello [bold]as it is[/bold] " + "x" * 150 + "\n"


@pytest.mark.parametrize("width", [80, 100])
def test_figures_of_the_options_are_never_cut_off(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """They are what the decision rests on; words give way, and the one that is run keeps its mark."""
    option = Option(
        micro_batch=16,
        accumulation=1,
        recomputed=12,
        num_layers=24,
        release=True,
        weights="native split8",
        peak_bytes=8 * MIB,
        state_bytes=0,
        samples_per_s=1167.0,
        risk=0.07990701,
        step_s=1.66,
        why="does not fit even with the least state",
        chosen=True,
    )
    monkeypatch.setattr(console, "PLAIN_WIDTH", width)
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    console.print_options([option], objective="quality")
    text = out.getvalue()
    assert all(word in text.split() for word in (">", "8.00", "MiB", "1,660", "1,167", "0.0799")), text
    assert "\u2026" not in text and text.split().count("does") == 1


def test_the_run_folder_can_be_copied_whole(capsys: pytest.CaptureFixture[str]) -> None:
    folder = "/a" * 100
    console.print_result(make_result(num_reallocations=1), run_dir=folder)
    out = capsys.readouterr().out
    assert f"run folder  {folder}\n" in out
    assert "1 reallocation\n" in "\n".join(line.rstrip() for line in out.splitlines()) + "\n"


def test_auto_before_the_device_was_asked_is_no_budget_without_limit() -> None:
    assert console.describe_budget(Budget(name="auto")) == "auto: what the device has free"
    assert console.describe_budget(Budget(name="unlimited")) == "unlimited: no limit"


def test_a_progress_line_is_drawn_on_a_terminal_and_gone_afterwards(monkeypatch: pytest.MonkeyPatch):
    """What is printed meanwhile stays above it; a log file has neither the line nor its control codes."""
    plain = console.make_console
    for terminal in (True, False):
        out = io.StringIO()
        made = Console(file=out, force_terminal=terminal, width=80)
        monkeypatch.setattr(console, "make_console", lambda made=made, **_: made)
        with console.progress_line() as tell:
            tell("comparing 4 x 32")
            tell("trying 4 x 32")
        assert plain() is not made
        assert ("comparing 4 x 32" in out.getvalue()) is terminal and ("\x1b" in out.getvalue()) is terminal
        with console.progress_line(enabled=False) as tell:
            tell("silent")
        assert "silent" not in out.getvalue()
