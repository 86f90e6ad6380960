"""The deepest Llama whose training step fits a device budget, by where and how its optimizer states are kept.

    python experiments/benchmarks/largest_llama.py  # time not recorded, CPU -> largest_llama.csv
    python experiments/benchmarks/largest_llama.py --train 22 --budgets 8  # the same, H200 -> printed
    python experiments/benchmarks/largest_llama.py --gpus 8 --width 4096 --budgets 24 --short 1.9
    # CPU -> largest_llama_sharded.csv

Peaks are those of mode=plan for a card that is not here (shapes counted, bf16-mixed, micro-batch 1, recomputed
activations, released gradients), and the least that any allocation takes. Layers are those of the 1.3B network (width
2,048), or with --width 4096 of the 7B one. A depth is tried before it is told of. With `--train LAYERS` one method
(--methods) trains 3 steps of so many layers within one of --budgets on the GPU that is here, by `python run.py`, and
its peak is told; with `--gpus 2` under fully_shard, bf16 weights and gradients that are kept.

`--gpus 8` without `--train` plans such a rank of 8 instead, as the product chooses, in fake tensors of a fake process
group: largest_llama_sharded.csv has the deepest, or those of `--depths`. Bytes are live ones of fully_shard's code on a
CPU, on a line through two depths. `--short` GiB of a budget are left free, by what this count is below a peak on GPUs.
"""

import argparse
import io
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc import parallel
from baoc.config.compose import compose
from baoc.config.environment import commit
from baoc.config.from_hydra import from_hydra
from baoc.config.resolve import resolve
from baoc.core.budgets import parse_budget
from baoc.core.catalogue import with_placement
from baoc.core.rule_tags import RULE_INFOS
from baoc.errors import InfeasibleBudgetError
from baoc.kernels import Shape
from baoc.kernels.triton import muon_plan
from baoc.models.llama import CausalLM
from baoc.models.switches import recomputable_layers, set_recomputed
from baoc.optim.backends.fused import has_kernel, temporary_bytes
from baoc.optim.shards import local_shard
from baoc.parallel import Ranks, ranks
from baoc.planning.cards import CARDS
from baoc.profiling import describe, probe_footprint
from baoc.profiling.footprint import memory_reserve_bytes
from baoc.profiling.step_temporaries import step_temporaries
from baoc.training.measure.absent_card import PROFILE_BYTES, fake_, plan_for
from baoc.training.run import build, quieten
from baoc.training.session import Session, SessionSettings, largest_shards
from baoc.training.trainer import session_settings
from baoc.training.user_optimizer import widened
from baoc.types import Budget, Footprint, OptimizerSpec, Placement, Plan
from baoc.units import GIB
from experiments.benchmarks.shared import results_folder, write_rows

SHAPES = {256: (688, 8), 2048: (5461, 32), 4096: (11008, 32)}  # width -> hidden, heads; the first to try commands
METHODS = {
    "fp32 AdamW on the device": ("allocator=uniform_adamw", "catalogue.specs=[adamw]"),
    "packed AdamW on the device": ("catalogue.specs=[adamw_int8+split8]", "catalogue.keep_fp32_roles=[]"),
    "packed AdamW, streamed as it must": (
        "catalogue.specs=[adamw_int8+split8,adamw_int8+split8@streamed]",
        "catalogue.keep_fp32_roles=[]",
    ),
    "as the product chooses": (),
    "any spec on the device": ("catalogue.specs=['*','*+split8']", "catalogue.keep_fp32_roles=[]"),
    "any spec anywhere": (
        "catalogue.specs=['*','*+split8','*@streamed','*+split8@streamed']",
        "catalogue.keep_fp32_roles=[]",
    ),
}
FIXED = (
    "model=llama",
    "model.source=hf",
    "model.vocab_size=32000",
    "model.checkpointing=true",
    "dataset.sequence_length=1024",
    "batch_size=1",
    "micro_batch=1",
    "trainer.precision=bf16-mixed",
    "optim.release_gradients=true",  # for all methods alike: whole gradients would take as much as the weights
)
SHARDED = (  # of several GPUs, in the place of the last two of FIXED
    "trainer.strategy=fsdp",
    "trainer.precision=bf16-true",
)
# A checkpoint of tens of gigabytes takes longer than the steps, and so do random numbers: those that the model's own
# replace, and its own, of which a million are drawn and repeated. The peak that is measured is that of training: what
# is looked at before a plan is told by itself.
RUN = """
import atexit, runpy, sys, time
began = time.monotonic()
import torch
from baoc.training import trainer as assembly
from baoc.callbacks.checkpoint import SafeCheckpoint
SafeCheckpoint._save_last = SafeCheckpoint._save_best = lambda *_, **__: None
torch.nn.Linear.reset_parameters = lambda self: None
draw, some = torch.Tensor.normal_, torch.empty(2**20 + 7).normal_()
def normal_(self, mean=0.0, std=1.0, *, generator=None):
    if mean or self.numel() <= len(some) or self.device.type != "cpu" or not self.is_contiguous():
        return draw(self, mean, std, generator=generator)
    for part in self.detach().view(-1).split(len(some)):
        torch.mul(some[: len(part)], std, out=part)
    return self
torch.Tensor.normal_ = normal_
watch = assembly.watch_memory
def held():
    return {name: getattr(torch.cuda, f"max_memory_{name}")() for name in ("reserved", "allocated")}
def watch_memory(memory, *, strategy, predicted_bytes, **rest):
    if strategy.root_device.type == "cuda":
        print(f"before the plan: {held()}, the plan: {predicted_bytes}; {time.monotonic() - began:.0f} s", flush=True)
        atexit.register(lambda: print(f"held at the end: {held()}", flush=True))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    watch(memory, strategy=strategy, predicted_bytes=predicted_bytes, **rest)
assembly.watch_memory = watch_memory
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
PLANNED = (
    "mode=plan",
    "device=h100",
    "budget=1gb",  # below every one of them, so that each tells the least that it takes
)


@dataclass(kw_only=True)
class Peaks:
    """Least peaks by depth of one method, each planned once."""

    width: int
    overrides: tuple[str, ...]
    found: dict[int, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)

    def at(self, depth: int) -> int:
        if depth not in self.found:
            with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
                self.found[depth] = self._planned(depth, Path(folder))
        return self.found[depth]

    def _planned(self, depth: int, folder: Path) -> int:
        path = folder / "config.json"
        path.write_text(json.dumps(architecture(self.width, depth)))
        config = from_hydra(compose([*FIXED, *PLANNED, f"model.name_or_path={path}", *self.overrides]))
        resolved, card = resolve(config, device="cuda"), CARDS["h100"]
        with torch.device("meta"):
            task, data = build(resolved, run_dir=folder, device=card.name)
        self.sizes[depth] = sum(param.numel() for param in task.parameters())
        try:
            plan_for(
                card, resolved.config, task=task, data=data, settings=session_settings(resolved.config), run_dir=folder
            )
        except InfeasibleBudgetError as error:
            return error.least_feasible_bytes
        raise AssertionError("a step fits 1 GiB, so that the least peak is not told: lower the budget")


def architecture(width: int, depth: int) -> dict[str, object]:
    hidden, heads = SHAPES[width]
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": depth,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }


def deepest(peak: Callable[[int], int], *, limit: int, first: tuple[int, int] = (2, 6)) -> int:
    """The most layers whose peak is within `limit`, 0 where one layer is not: by lines through what was planned."""
    if peak(1) > limit:
        return 0
    low, high = first
    slope = (peak(high) - peak(low)) / (high - low)
    fits, over, turn = 1, 0, 0  # the deepest that was found to fit, and the shallowest that was not
    while over != fits + 1:
        guess = fits + max(1, int((limit - peak(fits)) / slope))
        if over:  # halves in between, for peaks that are far from any line
            guess, turn = min(guess, over - 1) if turn % 2 == 0 else (fits + over) // 2, turn + 1
        if peak(guess) <= limit:
            fits = guess
        else:
            over = guess
            slope = (peak(over) - peak(fits)) / (over - fits)
    return fits


def train(
    method: str, *, width: int, layers: int, budget: int, folder: Path, gpus: int, steps: int, device: str
) -> None:
    """Some steps by the command, without a checkpoint, whatever becomes of them; prints what it measured."""
    config = folder / "config.json"
    config.write_text(json.dumps(architecture(width, layers)))
    run_dir, launcher, fixed = folder / "run", [], FIXED
    if gpus > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
        launcher.append("--no-python")
        fixed = (*FIXED[:-2], *SHARDED, f"batch_size={2 * gpus}")
    once = (
        f"trainer.max_steps={steps}", "trainer.log_every_n_steps=1", "trainer.limit_val_batches=1",
        "checkpoint.export=false",
    )  # fmt: skip
    arguments = [*fixed, *METHODS[method], *once, f"budget={budget}gb", f"hydra.run.dir={run_dir}"]
    began = time.perf_counter()
    command = [
        *launcher,
        sys.executable,
        "-c",
        RUN,
        str(ROOT / "run.py"),
        *arguments,
        f"model.name_or_path={config}",
        f"device={device}",
    ]
    code = subprocess.run(command, cwd=ROOT).returncode
    print(f"{method}, {layers} layers, {budget} GiB: exit code {code} after {time.perf_counter() - began:.0f} s")
    for name in ("result.json", "metrics.jsonl"):
        for path in sorted(folder.rglob(name)):
            print(f"{name}: {path.read_text()[-1500:]}")
    for path in sorted(folder.rglob("footprint.json")):
        found = {key: value for key, value in json.loads(path.read_text()).items() if isinstance(value, int)}
        print(f"{path.name}: {found}")


# -- planned for a rank of several ------------------------------------------------------------------------------------


class _Alike(Ranks):
    """A fake group: every rank finds what this one finds."""

    def __init__(self, distributed: Any):
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()


def cut(width: int, depth: int, *, mesh: Any, fake: FakeTensorMode) -> CausalLM:
    """A bf16 network of fake tensors with recomputed layers, cut over the mesh."""
    given: dict[str, Any] = {key: value for key, value in architecture(width, depth).items() if isinstance(value, int)}
    given |= {"use_cache": False, "attn_implementation": "sdpa"}
    with torch.device("meta"):
        config: Any = LlamaConfig(**given)
        module = CausalLM(LlamaForCausalLM(config).to(torch.bfloat16))
    with fake:
        fake_(module)
        set_recomputed(module, depth)
        for layer in recomputable_layers(module):
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
    return module


def looked_at(width: int, depth: int, *, mesh: Any) -> Footprint:
    """Live bytes of accumulated micro-batches of one sequence, on the rank that has most."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    module = cut(width, depth, mesh=mesh, fake=fake)
    with fake:
        tokens = torch.zeros(1, 1024, dtype=torch.long)

        def loss() -> Tensor:
            return cross_entropy(module(tokens).flatten(0, 1).float(), tokens.flatten())

        return replace(probe_footprint(module, run_micro_batch=loss, warm=False, accumulation=2), intervals=())


def line_of(short: Footprint, long: Footprint, *, share: float) -> Footprint:
    """The footprint so many times as far from `short` as `long` is."""
    numbers = {each.name: (getattr(short, each.name), getattr(long, each.name)) for each in fields(Footprint)}
    counts = {name: ends for name, ends in numbers.items() if name.endswith("_bytes") and isinstance(ends[0], int)}
    return replace(short, **{name: int(low + share * (high - low)) for name, (low, high) in counts.items()})


def temporaries_of(specs: Iterable[OptimizerSpec], params: Mapping[str, Any], *, size: int) -> dict[str, int]:
    """Bytes that the kernels of a step take beside states; of what has none, those of the same operators on a CPU."""
    parts = [local_shard(param) for param in params.values()]
    hidden = [param for name, param in params.items() if param.ndim > 1 and "layers" in name]
    shapes = [Shape(numel=param.numel(), rows=len(param), cols=param.numel() // len(param)) for param in hidden]
    largest = torch.empty(max(parts, key=torch.numel).shape, device="meta", dtype=torch.bfloat16)
    found: dict[str, int] = {}
    for spec in specs:
        here = with_placement(spec, Placement.DEVICE)
        if RULE_INFOS[spec.rule].hidden_only:
            found[spec.name] = muon_plan.temporary_bytes(shapes, ranks=size)
        elif has_kernel(here):
            found[spec.name] = temporary_bytes(here, params=parts)
        else:
            found |= step_temporaries([spec], params=[largest])
    return found


def planned_for(
    width: int, depth: int, *, footprint: Footprint, budget: Budget, mesh: Any
) -> tuple[int, Plan | None, int]:
    """Parameters, the plan if one fits, and the least bytes of any, of a rank on an H200 within the budget."""
    card, size = CARDS["h200"], mesh.size()
    module = cut(width, depth, mesh=mesh, fake=FakeTensorMode(allow_non_fake_inputs=True))
    params = dict(module.named_parameters())
    count = sum(param.numel() for param in params.values())
    session = Session(
        largest_shards(describe(module), params=params),
        params=params,
        budget=budget,
        settings=widened(SessionSettings(), device="cuda", budget=budget, precision="bf16-true"),
        betas=(0.9, 0.95),
        device=torch.device("cpu"),
        module=module,
        ranks=ranks(),
    )
    profile, peak = int(PROFILE_BYTES * count / size), footprint.forward_backward_bytes
    footprint = replace(
        footprint,
        context_bytes=card.context_bytes,
        reserve_bytes=memory_reserve_bytes(torch.device("cuda"), peak=peak) + card.workspace_bytes,
        profile_bytes=profile,
        profile_temporary_bytes=profile,
        step_temporary_bytes=temporaries_of(session.settings.planner.all_specs.values(), params, size=size),
    )
    try:
        plan = session.planner_for(footprint, budget=budget).propose()
    except InfeasibleBudgetError as error:
        return count, None, error.least_feasible_bytes
    return count, plan, plan.least_feasible_bytes


def plan_sharded(width: int, *, gpus: int, budgets: Sequence[int], short: float, depths: Sequence[int]) -> None:
    """The deepest network for a rank of `gpus` by budget, or what `depths` take."""
    parallel.ProcessGroupRanks = _Alike
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=gpus)
    mesh, ends, rows = init_device_mesh("cpu", (gpus,)), (4, 12), list[dict[str, object]]()
    looks = [looked_at(width, depth, mesh=mesh) for depth in ends]
    for gib in budgets:
        limit, found = int((gib - short) * GIB), dict[int, tuple[int, Plan | None, int]]()
        budget = parse_budget(limit)

        def least(depth: int, budget: Budget = budget, found: Any = found) -> int:
            footprint = line_of(looks[0], looks[1], share=(depth - ends[0]) / (ends[1] - ends[0]))
            found[depth] = planned_for(width, depth, footprint=footprint, budget=budget, mesh=mesh)
            return found[depth][2]

        for depth in depths or [deepest(least, limit=limit, first=ends)]:
            if depth not in found:
                least(depth)
            count, plan, num_bytes = found[depth]
            specs = Counter(plan.allocation.choices.values()).most_common(3) if plan is not None else []
            row = {"gpus": gpus, "budget_gib": gib, "short_gib": short, "width": width, "layers": depth}
            row |= {"parameters": count, "least_bytes": num_bytes, "peak_bytes": plan and plan.peak_bytes}
            row |= {"state_bytes": plan and plan.allocation.state_bytes}
            rows.append({**row, "specs": " ".join(f"{spec}:{num}" for spec, num in specs), "commit": commit()})
            print(rows[-1], flush=True)
            write_rows(results_folder() / "largest_llama_sharded.csv", rows)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, choices=SHAPES, default=2048)
    parser.add_argument("--budgets", nargs="+", type=int, default=[8, 16, 24], help="GiB of device memory")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--train", type=int, metavar="LAYERS", help="train this many, instead of looking for them")
    parser.add_argument("--gpus", type=int, default=1, help="of what is trained, or planned under fully_shard")
    parser.add_argument("--short", type=float, default=0.0, help="GiB of a sharded rank that the count lacks")
    parser.add_argument("--depths", nargs="+", type=int, default=[], help="to plan under fully_shard, else the deepest")
    parser.add_argument("--steps", type=int, default=3, help="of what is trained")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="of what is trained")
    parser.add_argument("--folder", type=Path, help="of what is trained; else one that goes")
    args = parser.parse_args()
    if args.train:
        with tempfile.TemporaryDirectory() as folder:
            budget, method, where = args.budgets[0], args.methods[0], args.folder or Path(folder)
            where.mkdir(parents=True, exist_ok=True)
            given = {"width": args.width, "layers": args.train, "gpus": args.gpus, "steps": args.steps}
            return train(method, budget=budget, folder=where, device=args.device, **given)
    quieten()
    if args.gpus > 1:
        given = {"gpus": args.gpus, "budgets": args.budgets, "short": args.short, "depths": args.depths}
        return plan_sharded(args.width, **given)
    rows: list[dict[str, object]] = []
    for method in args.methods:
        peaks, began = Peaks(width=args.width, overrides=METHODS[method]), time.perf_counter()
        for budget in args.budgets:
            depth = deepest(peaks.at, limit=budget * GIB)
            rows.append(
                {
                    "method": method,
                    "budget_gib": budget,
                    "width": args.width,
                    "layers": depth,
                    "parameters": peaks.sizes.get(depth, 0),
                    "peak_bytes": peaks.found[depth] if depth else "",
                }
            )
            size = peaks.sizes.get(depth, 0) / 1e9
            print(f"{method:32} {budget:3} GiB: {depth:4} layers, {size:6.2f}B parameters", flush=True)
            write_rows(results_folder() / "largest_llama.csv", rows)
        print(f"  ({len(peaks.found)} plans, {time.perf_counter() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
