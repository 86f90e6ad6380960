"""Launches the kernels that update means along lines and columns, before `triton.matrix` steps by them."""

from typing import TYPE_CHECKING

from baoc.kernels.triton import means_plan
from baoc.kernels.triton.elementwise import DTYPES
from baoc.kernels.triton.kinds import Call
from baoc.kernels.triton.means import clip_kernel, column_sums_kernel, finish_kernel, line_sums_kernel, lines_kernel

if TYPE_CHECKING:
    from baoc.kernels.triton.table import FusedTable


def bring_up_to_date(table: "FusedTable", plan: means_plan.Plan, call: Call) -> None:
    """Updates the means that several programs share, and the factors of the updates."""
    adafactor, mode = plan.adafactor, call.mode
    grads = {"GRAD": DTYPES[table.grad_dtype], "MARKED": call.marked}
    m = table.kind.m if table.kind.traits.has_m else "none"
    places = (table.shape_tensor, table.ptrs, table.grad_ptrs, table.settings, plan.places, plan.vectors)
    sums = (plan.sums, plan.squares, plan.counts)
    for (width, aligned, grouped), programs in plan.whole.items():
        lines_kernel[(programs.count,)](
            programs.owner, programs.first, *places, *sums, plan.tiles, plan.lines_per_program(width), M=m, **grads,
            MODE=mode, WIDEST=width, LINES=max(means_plan.TILE // width, 1), GROUPED=grouped,
            VEC=table.vector if aligned else 1,
            num_warps=min(max(width, means_plan.TILE) // plan.per_warp, 32),
        )  # fmt: skip
    if plan.line_sums.count:
        line_sums_kernel[(plan.line_sums.count,)](
            plan.line_sums.owner, plan.line_sums.first, table.shape_tensor, table.grad_ptrs, plan.places, plan.sums,
            plan.counts, **grads, LINES=means_plan.LINES, PIECE=means_plan.PIECE, VEC=table.vector, num_warps=4,
        )  # fmt: skip
        _finish(table, plan, plan.line_jobs, mode=mode, squares=False)
    if plan.column_sums.count:
        column_sums_kernel[(plan.column_sums.count,)](
            plan.column_sums.owner, plan.column_sums.first, *places, *sums, ADAFACTOR=adafactor, M=m, **grads,
            ROWS=means_plan.ROWS, COLUMNS=means_plan.COLUMNS, VEC=table.vector, num_warps=4,
        )  # fmt: skip
    _finish(table, plan, plan.column_jobs, mode=mode, squares=adafactor)
    if adafactor:
        clip_kernel[(len(table.params),)](
            table.shape_tensor, table.grad_ptrs, table.settings, plan.places, plan.tiles, plan.scales, LANES=128
        )


def _finish(table: "FusedTable", plan: means_plan.Plan, jobs: means_plan.Jobs, *, mode: str, squares: bool) -> None:
    if jobs.programs.count:
        finish_kernel[(jobs.programs.count,)](
            jobs.programs.owner, jobs.programs.first, jobs.rows, table.ptrs, table.grad_ptrs, table.settings, plan.sums,
            plan.squares, plan.counts, plan.vectors, plan.tiles, ADAFACTOR=plan.adafactor, NORM=plan.norm,
            SQUARES=squares, MODE=mode, LENGTH=means_plan.JOB_LENGTH,
        )  # fmt: skip
