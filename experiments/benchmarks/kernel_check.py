"""Every fused kernel against its eager twin on the GPU, over several processes because each variant has to be compiled.

    python experiments/benchmarks/kernel_check.py  # 1 minute of an H200 -> printed
    python experiments/benchmarks/kernel_check.py matrices foam_l2 foam_l3  # less -> printed
    python experiments/benchmarks/kernel_check.py repeats  # 1 minute of an H200 -> printed

optimizer_step.py runs it first. `matrices` checks rules of matrices, `cuts` elementwise ones, only those whose names
begin as given; `cuts` tries each rule's own launch config and the swept ones. `repeats` launches the same step many
times, in WORKERS processes that take turns on the GPU, and compares bits: a race between a kernel's warps shows so,
where one step rarely does.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc.kernels import LaunchConfig
from baoc.optim.codecs import lanes
from tests.support.fused_step import launch, prepare
from tests.support.kernel_cases import Case, Twin, all_cases, check_equal
from tests.support.matrix_cases import SHAPES, MatrixCase, MatrixTwin, check_close, matrix_cases

WORKERS = 8
REPEATS = 200
DEVICE = "cuda"
CHECK_SIZES = (1, 7, 255, 256, 257, 0, 9991, 200_000)
MATRICES = (*SHAPES, (768, 1024, False), (515, 1365, False), (300, 9000, False), (9000, 40, False), (1024, 130, True))
MATRICES += ((60, 5461, False), (5461, 130, False))  # a side of Llama 1.3B that nothing divides
CUTS = [
    LaunchConfig(chunk=chunk, warps=warps, vector=vector)
    for vector in (4, 8)
    for chunk, warps in ((256, 1), (256, 2), (512, 1), (512, 2), (1024, 2), (1024, 4), (2048, 4))
]
CUTS += [LaunchConfig(chunk=256, warps=1, vector=8, registers=registers) for registers in (64, 80)]
SWEPT = [
    ("adamw", "fp32", "native"),
    ("adamw", "int8", "native"),
    ("adamw", "int8", "split8"),
]  # rule, storage, weights


def text_of(cut: LaunchConfig) -> str:
    return f"{cut.chunk}/{cut.warps}/{cut.vector}" + (f"/{cut.registers}" if cut.registers else "")


def check(part: int, parts: int) -> None:
    """Every kernel variant and cut against its eager twin; raises on the first that differs."""
    check_elementwise(part, parts)
    check_matrices(part, parts)
    if part == 0:
        check_graph()


def spoil(twin: Twin) -> None:
    """Makes elements of the gradients too large or no numbers."""
    for index, param in enumerate(twin.params):
        if param.grad is not None and param.grad.numel():
            flat = param.grad.view(-1)
            flat[::997] = float("nan")
            flat[index % 32 :: 1499] = 2.0**48
            flat[(7 * index + 5) % 32 :: 2003] = -1e20


def check_elementwise(part: int, parts: int, *, only: tuple[str, ...] = ("",)) -> None:
    """Rules that see no matrix. The last step has elements that are not finite, or too large."""
    cases = all_cases(DEVICE, sizes=CHECK_SIZES, config=None)
    for rule, storage, weights in SWEPT:
        dtype = torch.float32 if weights == "native" else torch.bfloat16
        given = {"rule": rule, "storage": storage, "weights": weights, "param": dtype, "grad": dtype}
        cases += [Case(**given, device=DEVICE, sizes=CHECK_SIZES, config=cut) for cut in CUTS]
    for case in [case for case in cases if case.name.startswith(only)][part::parts]:
        twin, odd = Twin(case), []
        for step, idle in enumerate(((), (3,), ())):
            twin.new_gradients(idle=idle)
            if step == 2:
                spoil(twin)
            twin.step()
            odd.append(check_equal(twin))
        matched = case.rule != "adamw"
        launch(twin.table, matched=matched, track=matched)  # as timed, for the cache
        print(f"equal {case.name} {text_of(twin.table.config)} odd codes {max(odd):.1e}", flush=True)


def check_matrices(part: int, parts: int, *, only: tuple[str, ...] = ("",)) -> None:
    """The same for rules that see a matrix; long lines and many, and sizes that nothing divides."""
    cases = [case for case in matrix_cases(DEVICE, shapes=MATRICES) if case.name.startswith(only)]
    for case in cases[part::parts]:
        twin, odd = MatrixTwin(case), []
        for step, idle in enumerate(((), (3,), ())):
            twin.new_gradients(idle=idle)
            if step == 2:
                spoil(twin)
            twin.step(factors=[0.5 + index for index in range(len(twin.params))])
            odd.append(check_close(twin))
        print(f"equal {case.name} {text_of(twin.table.config)} odd codes {max(odd):.1e}", flush=True)


def check_repeats(part: int, parts: int, *, only: tuple[str, ...] = ("",)) -> None:
    """The same step from the same bits, REPEATS times: weights and states must have the same bits each time. Also with
    elements that are skipped, and matched, where the rule is."""
    cases = [*all_cases(DEVICE, sizes=CHECK_SIZES, config=None), *matrix_cases(DEVICE, shapes=MATRICES)]
    for case in [case for case in cases if case.name.startswith(only)][part::parts]:
        twin = MatrixTwin(case) if isinstance(case, MatrixCase) else Twin(case)
        twin.new_gradients()
        prepare(twin.table, options=twin.case.options, thresholds=lanes(1, torch.device("cpu")))
        odd = num_differing(twin, partial(launch, twin.table))
        spoil(twin)
        odd += num_differing(twin, partial(twin.engine.run, matched=case.rule != "adamw"))
        print(f"{'differs' if odd else 'equal'} {case.name} in {odd} of {2 * REPEATS}", flush=True)


def num_differing(twin: Twin, step: Callable[[], object]) -> int:
    tensors = [p.detach() for p in twin.params] + [t for state in twin.states for t in state.values()] + twin.matches
    before = [t.clone() for t in tensors]
    first, odd = None, torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(REPEATS):
        for tensor, saved in zip(tensors, before, strict=True):
            tensor.copy_(saved)
        step()
        first = first or [t.clone() for t in tensors]
        pairs = zip(tensors, first, strict=True)
        odd += torch.stack([(a.view(torch.uint8) != b.view(torch.uint8)).any() for a, b in pairs]).any()
    for tensor, saved in zip(tensors, before, strict=True):
        tensor.copy_(saved)
    return int(odd)


def check_graph() -> None:
    """A captured launch, replayed after each `prepare`, does what plain steps do, though gradients move."""
    plain, captured = (Twin(Case(rule="adamw", storage="int8", device=DEVICE, sizes=CHECK_SIZES)) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    for step in range(1, 4):
        thresholds = lanes(step, torch.device("cpu"))
        for twin in (plain, captured):
            twin.new_gradients()
            prepare(twin.table, options=twin.case.options, thresholds=thresholds)
        launch(plain.table)
        if step == 1:
            launch(captured.table)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):  # captures, does not run
                launch(captured.table)
        else:
            graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(plain.params, captured.params, strict=True)), "graph replay differs"
    print("equal CUDA graph replay", flush=True)


def check_in_parallel(*what: str) -> None:
    running = [
        subprocess.Popen(
            [sys.executable, __file__, *what, "--part", f"{part}/{WORKERS}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for part in range(WORKERS)
    ]  # fmt: skip
    outputs = [(process.communicate()[0], process.returncode) for process in running]
    differing = [line for text, _ in outputs for line in text.splitlines() if line.startswith("differs")]
    for line in differing:
        print(line)
    checked = [line for text, _ in outputs for line in text.splitlines() if line.startswith("equal")]
    for text, code in outputs:
        if code:
            print(text[-3000:])
    failed = sum(code != 0 for _, code in outputs)
    same = "have the same bits every time" if "repeats" in what else "equal their eager twins"
    print(f"{len(checked)} kernel variants {same}, {len(differing)} do not; {failed} of {WORKERS} processes failed")
    coded = [line for line in checked if "odd codes" in line]  # none of `repeats`
    if worst := sorted(coded, key=lambda line: float(line.split()[-1]))[-3:]:
        print("most odd codes:", *worst, sep="\n  ", flush=True)
    if failed or differing:
        sys.exit(1)


FAMILIES = {"matrices": check_matrices, "cuts": check_elementwise, "repeats": check_repeats}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", nargs="?", default="all", choices=("all", *FAMILIES))
    parser.add_argument("names", nargs="*", default=("",), help="beginnings of the rules' names; all by default")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part is None:
        return check_in_parallel(given.family, *filter(None, given.names))
    part, parts = map(int, given.part.split("/"))
    if given.family == "all":
        return check(part, parts)
    FAMILIES[given.family](part, parts, only=tuple(given.names))


if __name__ == "__main__":
    main()
