"""compute-sanitizer over whole fused steps: accesses out of bounds or misaligned, races, uninitialised reads, barriers.

    python experiments/benchmarks/sanitize.py  # time not recorded, H200 with CUDA tools -> sanitize.txt

Specs that use every kernel
and every codec step tensors whose sizes are no multiple of anything, with missing and non-finite gradients, marked and
not. Each tensor is an allocation of its own (torch's cache is off), so that a step past its end is seen. Steps are
launched plainly, for a graph's allocator is torch's cache. `--specs control` looks at a plain Triton kernel that sums a
tile along both sides: what a tool reports of it comes of how Triton exchanges values, such as several threads that
write one value to one place. The exit code is the number of tools that found something;
what they say is printed and, if $OUT is set, written to sanitize.txt there.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SPECS = (
    "adamw", "adamw_bf16", "adamw_int8+split8", "adamw_int8_root+split8", "adamw_int4",
    "rmsprop_int8", "lion_int8+bf16_sr", "signum_int8", "sign", "adamw_shared_in_int8", "adamw_shared_out_int8+split8",
    "adafactor", "adafactor_momentum_int8", "foam_l2_int8", "foam_l1_int8+split8", "muon_int8",
)  # fmt: skip
SHAPES = ((1,), (33,), (40, 61), (7, 700), (130, 258), (64, 256))


def work(specs: Sequence[str]) -> None:
    """What is looked at: three steps of every spec."""
    if list(specs) == ["control"]:
        from experiments.benchmarks.sanitize_control import sum_both_ways

        return sum_both_ways()
    import torch
    from torch import nn

    from baoc.core.catalogue import SPECS as CATALOGUE
    from baoc.optim import BlockwiseOptimizer
    from baoc.optim.rules import RULES

    torch.manual_seed(0)
    for spec in specs:
        matrices = RULES[CATALOGUE[spec].rule].info.needs_matrix
        shapes = [shape for shape in SHAPES if len(shape) == 2 or not matrices]
        params = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
        optimizer = BlockwiseOptimizer([(f"p{i}", p) for i, p in enumerate(params)], spec, lr=1e-3, backend="fused")
        for backend in optimizer.registry.step_unit().backends:
            backend.graphs = False  # pyright: ignore[reportAttributeAccessIssue]
        for step in range(3):
            for index, param in enumerate(params):
                param.grad = None if step == 1 and index == 1 else torch.randn_like(param)
                if param.grad is not None and step == 2:
                    param.grad.view(-1)[:: 1 + index] = float("nan")
            if step == 2:
                optimizer.mask_nonfinite()
            optimizer.step()
        torch.cuda.synchronize()
        stepped = {choice.backend for choice in optimizer.registry.choices.values()}
        assert stepped == {"fused"}, f"{spec}: {stepped}"
        print(f"stepped {spec}: {optimizer.num_nonfinite} elements were not finite", flush=True)


def found_in(text: str) -> str:
    """What a tool reported, each kind of report and the kernel it is about once, or the last line it wrote."""
    marked = [line.removeprefix("=========").strip() for line in text.splitlines() if line.startswith("=========")]
    told = [re.sub(r"0x[0-9a-f]+|\(\d+,\d+,\d+\)|\d{3,}", "#", line) for line in marked if line]
    kinds = [
        line for line in told if re.search(r"[Hh]azard|Error|Invalid|Uninit|Barrier|Race|_kernel|SUMMARY|exist", line)
    ]
    return "; ".join(list(dict.fromkeys(kinds))[:12]) or text.strip().splitlines()[-1]


def run(tool: str, specs: Sequence[str]) -> tuple[int, str]:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    work = [sys.executable, __file__, "--work", "--specs", *specs]
    done = subprocess.run([*command, *work], env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--specs", nargs="+", default=list(SPECS))
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(args.specs)
    command = [sys.executable, __file__, "--work", "--specs", *args.specs]
    plain = subprocess.run(command, check=True, capture_output=True, text=True)  # compiles
    failed, texts = 0, [plain.stdout]
    for tool in args.tools:
        code, text = run(tool, args.specs)
        failed += code != 0
        texts.append(f"== {tool}: exit code {code}\n{text[:6000]}\n...\n{text[-3000:]}")
        print(f"{tool}: {'clean' if not code else 'FOUND SOMETHING'}; {found_in(text)}", flush=True)
        if os.environ.get("OUT"):
            (Path(os.environ["OUT"]) / "sanitize.txt").write_text("\n".join(texts))
    sys.exit(failed)


if __name__ == "__main__":
    main()
