"""Output on the terminal: start-up summary, allocation, reallocations, result, and tables of frontiers.

Without a terminal (a log file, a multirun's job), tables are 100 columns wide and have no colours. Each print makes a
new console, so that it follows a stdout that was redirected meanwhile.
"""

import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import IO, Any, cast

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from baoc.core.budgets import AUTO
from baoc.tracking.rows import collapsed_rows, role_rows
from baoc.types import Budget, FailedRun, FrontierPoint, Option, Plan, Reallocation, RunResult
from baoc.units import KIB, format_bytes

PLAIN_WIDTH = 100  # columns without a terminal
MAX_WIDTH = 160  # columns of a table on a wide terminal
MAX_PRINTED_MOVES = 24
MAX_PRINTED_POINTS = 24
MAX_NARROW_REASON = 40  # characters
NUMBERS_WIDTH = 62  # columns of a frontier's numbers and marks

_live_consoles: list[Console] = []  # draw a progress bar, over which rich would draw another console's output


def attach_live(console: Console) -> None:
    """Prints all output above the progress bar of `console`, until `detach_live`."""
    _live_consoles.append(console)


def detach_live(console: Console) -> None:
    if console in _live_consoles:
        _live_consoles.remove(console)


@contextmanager
def progress_line(*, enabled: bool = True) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows a text in the last line of the terminal until the next call or the end of the block.
    Without a terminal it does nothing.

    The line is drawn by the call: a thread that refreshed it would disturb step times that are measured meanwhile.
    """
    console = make_console()
    if not (enabled and console.is_terminal):
        yield lambda _: None
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        attach_live(console)
        try:
            yield lambda text: live.update(Text(text, style="dim", no_wrap=True, overflow="ellipsis"), refresh=True)
        finally:
            detach_live(console)


class PipeSafeConsole(Console):
    """Stops printing if the reader of a pipe has exited; rich would end the run."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with open(os.devnull, "wb") as devnull:
            os.dup2(devnull.fileno(), sys.stdout.fileno())


class _WithoutPadding:
    """Standard output without the blanks by which tables fill their lines."""

    def write(self, text: str) -> int:
        return sys.stdout.write(re.sub(r" +$", "", text, flags=re.MULTILINE))

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


def make_console() -> Console:
    """The console of the progress bar, or a new one on the current stdout."""
    if _live_consoles:
        return _live_consoles[-1]
    console = PipeSafeConsole(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        out = cast(IO[str], _WithoutPadding())
        return PipeSafeConsole(file=out, highlight=False, width=PLAIN_WIDTH, no_color=True, color_system=None)
    if console.width > MAX_WIDTH:
        console.width = MAX_WIDTH
    return console


def say(text: str) -> None:
    """Prints a text without wrapping its lines."""
    make_console().print(text, markup=False, soft_wrap=True)


def print_key_values(title: str, pairs: Mapping[str, str | None], *, run_dir: str | Path | None) -> None:
    """Prints keys and values, without keys whose value is None. The run folder comes last, in one line to be copied."""
    table = Table(box=None, show_header=False, title=title, title_justify="left", title_style="bold", pad_edge=False)
    table.add_column(style="dim", no_wrap=True, min_width=len("run folder"))
    table.add_column(overflow="fold")
    for key, value in pairs.items():
        if value is not None:
            table.add_row(key, escape(value))
    console = make_console()
    console.print(table)
    if run_dir is not None:
        console.print(f"[dim]run folder[/dim]  {escape(str(run_dir))}", soft_wrap=True)
    console.print()


def describe_budget(budget: Budget) -> str:
    """The limits of a budget, as in `8gb: 8.00 GiB (8589934592 bytes) of device memory`."""
    limits = []
    if budget.memory_bytes is not None:
        limits.append(f"{format_bytes(budget.memory_bytes)} ({budget.memory_bytes} bytes) of device memory")
    if budget.state_fraction is not None:
        limits.append(f"{budget.state_fraction:.4g} of fp32 AdamW's state bytes")
    if budget.step_time is not None:
        limits.append(f"{budget.step_time:.4g} x the step time of fused AdamW")
    if budget.host_memory_bytes is not None:
        host = budget.host_memory_bytes
        limits.append(f"{format_bytes(host)} ({host} bytes) of pinned host memory")
    none = "what the device has free" if budget.name == AUTO else "no limit"
    return f"{budget.name}: {', '.join(limits) or none}"


def print_plan(plan: Plan, *, title: str = "Allocation") -> None:
    """Prints the allocation as a table, then its totals, and whether the budget binds."""
    names = Column("block", overflow="fold", max_width=28), Column("spec", overflow="fold", max_width=24)
    numbers = number_columns("bytes", *([] if _is_measured(plan) else ["risk"]))  # measurements are of recipes
    console, rows = make_console(), collapsed_rows(plan)
    # On a narrow terminal a long reason would be a column of single words: it has lines of its own, below the table
    reasons_below = console.width < PLAIN_WIDTH and any(len(row.why) > MAX_NARROW_REASON for row in rows)
    table = make_table(title, *names, *numbers, *([] if reasons_below else [Column("why", overflow="fold", ratio=1)]))
    for row in rows:
        size = "-" if row.state_bytes is None else format_bytes(row.state_bytes)
        size = f"{format_bytes(row.host_bytes)} h" if row.host_bytes else size
        risk = [] if _is_measured(plan) else ["-" if row.risk is None else f"{row.risk:.3g}"]
        table.add_row(escape(row.block), escape(row.spec), size, *risk, *([] if reasons_below else [escape(row.why)]))
    console.print(table)
    if any(reason.cheaper or reason.dearer for reason in plan.reasons):
        console.print("why: the next cheaper and dearer spec, and the bytes and risk each would change", style="dim")
    for row in rows:
        if reasons_below and row.why:
            console.print(f"{row.block}: {row.why}", markup=False)
    if plan.allocation.host_bytes:
        console.print("h: on the host, where @ says how they are stepped", style="dim")
    for line in plan_lines(plan):
        console.print(line, markup=False)
    console.print()


def summary_text(plan: Plan, *, title: str) -> str:
    """The allocation as text: a table with one row per role and spec, then its totals."""
    console = PipeSafeConsole(file=StringIO(), width=PLAIN_WIDTH, no_color=True, color_system=None, highlight=False)
    names = Column("role", overflow="fold"), Column("spec", overflow="fold")
    columns = (*names, *number_columns("blocks", "parameters", "state", "risk"))
    table = Table(*columns, box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for row in role_rows(plan):
        size = "-" if row.state_bytes is None else format_bytes(row.state_bytes)
        size = f"{format_bytes(row.host_bytes)} (host)" if row.host_bytes else size
        risk = "-" if row.risk is None else f"{row.risk:.3g}"
        table.add_row(escape(row.block), escape(row.spec), str(row.num_blocks), f"{row.num_params:,}", size, risk)
    console.print(table)
    for line in plan_lines(plan):
        console.print(line, markup=False, soft_wrap=True)
    assert isinstance(console.file, StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def step_time_line(plan: Plan) -> str | None:
    """The optimizer's predicted seconds beside those that a limit on the step's time allows; None without one."""
    if plan.budget.step_time is None or plan.limits.step_s is None:
        return None
    return (
        f"optimizer step {plan.allocation.step_s * 1e3:.3g} ms predicted, {plan.limits.step_s * 1e3:.3g} ms allowed by "
        f"step_time={plan.budget.step_time:g}"
    )


def plan_lines(plan: Plan) -> list[str]:
    """Totals of a plan: state, risk, peak, and the range of budgets that bind."""
    allocation = plan.allocation
    share = allocation.state_bytes / max(plan.state_bytes_adamw, 1)
    gap = "" if allocation.gap is None else ", proven optimal" if allocation.gap == 0 else f", gap {allocation.gap:.2g}"
    risk = f"; risk {allocation.risk:.4g} by risk={plan.risk_model} (allocator={allocation.allocator}{gap})"
    lines = [
        f"state {format_bytes(allocation.state_bytes)} ({allocation.state_bytes} bytes), {share:.1%} of fp32 AdamW's "
        f"{format_bytes(plan.state_bytes_adamw)}{'' if _is_measured(plan) else risk}"
    ]
    if plan.basis is not None:
        lines.append(f"chosen by {plan.basis.by}: {plan.basis.text}")
    if (time := step_time_line(plan)) is not None:
        lines.append(time)
    lines += _host_lines(plan)
    if plan.budget.kind == "none":
        by_allocator = "the recipe asks of it" if allocation.allocator == "recipe" else "has the least risk"
        criterion = "measured best" if _is_measured(plan) else by_allocator
        within = "" if plan.budget.step_time is None else f" within step_time={plan.budget.step_time:g}"
        return [*lines, f"no memory or state limit: every block runs what {criterion}{within}"]
    measure = "device memory" if plan.budget.kind == "memory" else "optimizer state"
    if plan.budget.kind == "memory":
        lines.append(f"predicted peak {format_bytes(plan.peak_bytes)} ({plan.peak_bytes} bytes)")
    low, high = plan.least_feasible_bytes, plan.most_useful_bytes
    span = f"from {_format_exact(low, 'the least feasible')} to {_format_exact(high)}"
    reason = "no recipe of more state measured better" if _is_measured(plan) else "nothing is given up"
    verdict = "binds" if plan.binding else f"does not bind: {reason}"
    return [*lines, f"budget {plan.budget.name} {verdict}; budgets that bind go {span} of {measure}"]


def _is_measured(plan: Plan) -> bool:
    """Whether the plan was chosen by measurements, which its basis states, and not by risk."""
    return plan.basis is not None and plan.basis.by == "measured"


def _format_exact(num_bytes: int, remark: str = "") -> str:
    """`7.50 GiB (8053063680 bytes, remark)`; below 1024 bytes the exact number only."""
    if num_bytes < KIB:
        return f"{num_bytes} bytes" + (f" ({remark})" if remark else "")
    return f"{format_bytes(num_bytes)} ({num_bytes} bytes" + (f", {remark})" if remark else ")")


def _host_lines(plan: Plan) -> list[str]:
    """The costs of host placement: pinned memory, bytes and time of transfers, staging memory on the device."""
    allocation = plan.allocation
    if not allocation.host_bytes:
        return []
    text = (
        f"on the host {format_bytes(plan.host_bytes)} ({plan.host_bytes} bytes, pinned); per step "
        f"{format_bytes(allocation.transfer_bytes)} over the link, which is busy for {allocation.link_s * 1e3:.3g} ms"
    )
    if plan.limits.link_s is not None:
        text += f", with {plan.limits.link_s * 1e3:.3g} ms allowed"
    return [f"{text}; {format_bytes(plan.staging_bytes)} of staging on the device"]


def print_options(options: Sequence[Option], *, objective: str) -> None:
    """Prints the options of the micro-batch search, one row each; > marks the chosen one, others give their reason."""
    names = Column("", no_wrap=True), Column("option", ratio=1), Column("weights", min_width=7)
    title, heads = f"Options by objective={objective} (predicted)", ("peak", "ms/step", "samples/s", "risk")
    table = make_table(title, *names, *number_columns(*heads))
    for option in options:
        risk = "-" if option.risk is None else f"{option.risk:.3g}"
        peak = format_bytes(option.peak_bytes) if option.peak_bytes else "-"
        step = "-" if math.isnan(option.step_s) else _ms(option.step_s * 1e3)
        name = f"{option.name}: {option.why}" if option.why else option.name
        numbers = peak, step, _rate(option.samples_per_s), risk
        table.add_row(">" if option.chosen else "", escape(name), option.weights, *numbers)
    make_console().print(table)


def print_planned(plans: Sequence[Mapping[str, Any]]) -> None:
    """Prints the plans of a multirun; a * marks those that no other one dominates."""
    names = [Column(header, no_wrap=True) for header in ("", "budget", "device")]
    numbers = number_columns("micro-batch", "peak", "state", "samples/s", "risk")
    table = make_table("Planned frontier", *names, *numbers, Column("differs in"))
    for plan in plans:
        rate, size = plan["samples_per_s"], plan["micro_batch"]
        table.add_row(
            "" if plan["dominated"] else "*",
            escape(str(plan["budget"])),
            escape(str(plan["device"])),
            "-" if size is None else str(size),
            format_bytes(plan["peak_bytes"]),
            format_bytes(plan["state_bytes"]),
            "-" if rate is None else f"{rate:,.0f}",
            f"{plan['risk']:.3g}",
            escape(plan["settings"]),
        )
    make_console().print(table)


def print_reallocation(event: Reallocation) -> None:
    """Prints one line for the decision, and one for each of up to MAX_PRINTED_MOVES moved blocks."""
    verdict = f"{_count(len(event.moves), 'block')} moved" if event.accepted else "nothing moved"
    sizes = f"{format_bytes(event.state_bytes_before)} -> {format_bytes(event.state_bytes_after)}"
    say(f"step {event.step}, reallocation ({event.trigger}): {verdict}; {event.why}; state {sizes}")
    for move in event.moves[:MAX_PRINTED_MOVES]:
        states = ", ".join(f"{state} {fate}" for state, fate in move.kept.items())
        say(f"  {move.block}: {move.source} -> {move.target} ({states})")
    if len(event.moves) > MAX_PRINTED_MOVES:
        say(f"  and {len(event.moves) - MAX_PRINTED_MOVES} more, in reallocations.jsonl")


def print_result(result: RunResult, *, run_dir: str | Path) -> None:
    """Prints the closing summary: quality, peak against budget, state, time, and the run folder."""
    quality = f"{result.quality.name} {result.quality.value:.4g}"
    others = ", ".join(f"{k} {v:.4g}" for k, v in result.metrics.items() if k != result.quality.name)
    share = result.state_bytes / max(result.state_bytes_adamw, 1)
    predicted_s = result.step_s_predicted
    predicted = "" if math.isnan(predicted_s) else f" ({_ms(predicted_s * 1e3)} ms predicted)"
    pairs = {
        "quality": f"{quality} ({'higher' if result.quality.higher_is_better else 'lower'} is better)",
        "metrics": others or None,
        "peak": f"{format_bytes(result.peak_bytes)} ({result.peak_bytes} bytes){rank_peaks_text(result.peak_by_rank)}, "
        f"predicted {format_bytes(result.peak_bytes_predicted)}",
        "budget": _budget_verdict(result),
        "state": f"{format_bytes(result.state_bytes)} ({result.state_bytes} bytes), {share:.1%} of fp32 AdamW's "
        f"{format_bytes(result.state_bytes_adamw)}",
        "step": "too few untracked steps to time one"
        if math.isnan(result.step_ms)
        else f"{_ms(result.step_ms)} ms{predicted}, {result.samples_per_s:,.0f} samples/s",
        "layers": f"{result.recomputed_layers} of {result.num_layers} recomputed" if result.num_layers else None,
        "steps": f"{result.num_steps}, {_count(result.num_reallocations, 'reallocation')}",
    }
    print_key_values(f"{result.name}, done", pairs, run_dir=run_dir)


def rank_peaks_text(peaks: Sequence[int]) -> str:
    """` (rank 0 11.97 GiB, rank 1 11.90 GiB)`; empty without peaks."""
    text = ", ".join(f"rank {rank} {format_bytes(peak)}" for rank, peak in enumerate(peaks))
    return f" ({text})" if text else ""


def _rate(samples_per_s: float) -> str:
    return "-" if math.isnan(samples_per_s) else f"{samples_per_s:,.0f}"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"  # .3g alone writes 1.66e+03


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _budget_verdict(result: RunResult) -> str | None:
    if result.budget_bytes is None:
        return None if result.budget_met is None else f"{'met' if result.budget_met else 'NOT met'}"
    is_memory = result.budget.get("kind") == "memory"
    used_bytes = result.peak_bytes if is_memory else result.state_bytes
    return budget_verdict(
        result.budget_bytes, used_bytes=used_bytes, met=result.budget_met, memory=is_memory, binding=result.binding
    )


def budget_verdict(limit_bytes: int, *, used_bytes: int, met: bool | None, memory: bool, binding: bool) -> str:
    """`8.00 GiB of device memory: met, 512.00 MiB to spare (binds)`; without `memory` it is of optimizer state.

    A budget of `budget.schedule` is met although more was used before it came into force.
    """
    slack = limit_bytes - used_bytes
    room = f"{format_bytes(slack)} to spare" if slack >= 0 else "the peak is of an earlier, larger budget"
    verdict = f"met, {room}" if met else f"NOT met, {format_bytes(-slack)} over"
    binds = "binds" if binding else "does not bind"
    kind = "of device memory" if memory else "of optimizer state"
    return f"{format_bytes(limit_bytes)} {kind}: {verdict} ({binds})"


def print_frontier(
    points: Sequence[FrontierPoint],
    *,
    failed: Sequence[FailedRun] = (),
    quality: str = "quality",
    title: str = "Frontier",
) -> None:
    """Prints runs by quality and bytes, of dominated ones as many as make up MAX_PRINTED_POINTS. A * marks undominated
    ones, failed jobs come last with the reason."""
    console = make_console()
    if points:
        show_ranks = any(point.num_ranks > 1 for point in points)
        numbers = number_columns(quality, "peak", "state", "samples/s", "seeds", *(["ranks"] if show_ranks else []))
        table = make_table(title, Column("", no_wrap=True), Column("run", overflow="fold", ratio=1), *numbers)
        shown = [point for at, point in enumerate(points) if at < MAX_PRINTED_POINTS or not point.dominated]
        room = console.width - NUMBERS_WIDTH - 8 * show_ranks
        labels_below = any(len(word) > room for point in shown for word in point.label.split())
        for number, point in enumerate(shown, start=1):
            spread = "" if point.quality_spread is None else f" ±{point.quality_spread:.2g}"
            table.add_row(
                "" if point.dominated else "*",
                str(number) if labels_below else escape(point.label),
                "diverged" if math.isnan(point.quality) else f"{point.quality:.4g}{spread}",
                format_bytes(point.peak_bytes),
                format_bytes(point.state_bytes),
                _rate(point.samples_per_s),
                str(point.num_seeds),
                *([str(point.num_ranks)] if show_ranks else []),
            )
        console.print(table)
        for number, point in enumerate(shown, start=1) if labels_below else ():
            console.print(f"{number}: {point.label}", markup=False)
        more = f"; {len(points) - len(shown)} dominated ones more in frontier.csv" if len(shown) < len(points) else ""
        console.print(f"* on the Pareto frontier of quality, peak and state bytes{more}", markup=False)
    if failed and points:
        console.print()
    for job in failed:
        code = "" if job.exit_code is None else f"exit code {job.exit_code}: "
        first = job.message.splitlines()[0] if job.message else "no message"
        name = job.run if job.label == job.run else f"{job.label} ({job.run})"
        say(f"{name}, {code}{first}")
    console.print()


def make_table(title: str, *columns: Column) -> Table:
    style: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "pad_edge": False, "expand": True}
    return Table(*columns, box=SIMPLE_HEAD, title=title, **style)


def number_columns(*headers: str) -> list[Column]:
    """Right-aligned columns that do not wrap."""
    return [Column(header, justify="right", no_wrap=True) for header in headers]
