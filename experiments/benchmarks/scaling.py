"""DDP and fully_shard at several numbers of ranks on one host: BaocOptimizer at a budget beside torch's fused AdamW.

    python experiments/benchmarks/scaling.py OUT --ranks 1 2 4 8  # time not recorded, 8 H200s -> scaling.csv
    TRITON_INTERPRET=1 python experiments/benchmarks/scaling.py OUT --part muon --device cpu --ranks 1 2
    # time not recorded, CPU -> scaling_muon.csv
    python experiments/benchmarks/scaling.py OUT --part study  # the same -> scaling_study.csv

As many processes as `--ranks` says start in turn, on GPUs or by `--device cpu` on gloo with small networks. Weak
scaling keeps the samples of a rank, strong scaling those of a step. A plain loop: one rank of DDP is the module itself;
networks on GPUs compute in bfloat16 (autocast under DDP, gathered so under fully_shard), on CPUs in fp32. `step_ms` is
the median over windows of the slowest rank, `optimizer_ms` that of `optimizer.step()` alone on gradients that stay.
`collectives` is the share of time in which rank 0 runs a collective, by torch's profiler (kernels of NCCL, calls of
gloo, which wait for other ranks); in that of `exposed` it runs no other kernel. `peak_bytes` is the largest of ranks,
context included. `efficiency` is samples/s over those of one rank times the ranks. Exit code 1: plans of one network
and strategy differ between rows, a peak is above its prediction, or no row was written.

`--part muon`: matrices that fully_shard cuts run 8-bit Muon by the fused kernels (on a CPU give TRITON_INTERPRET=1):
OUT/scaling_muon.csv has the bytes that a rank sends in a step, the floor (each matrix's float16 rows to the rank that
orthogonalizes it, and back), and how far updates are from those of the first of --ranks, which is to be 1. Exit code 1:
that is more than a hundredth, or no row was written. `--part study`: trials that hold 2 of 8 pretended devices, each
trained by 2 ranks on the CPU: OUT/scaling_study.csv.
"""

import argparse
import csv
import hashlib
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc import BaocOptimizer
from baoc.config.environment import commit
from baoc.models import build_model
from baoc.models.switches import recomputable_layers
from baoc.optim import BlockwiseOptimizer
from baoc.optim.shards import ShardGroup, warm_up_communicator
from baoc.parallel import ranks
from baoc.profiling import context_bytes
from baoc.profiling.memory import use_expandable_segments
from baoc.types import ImageDataSpec, TextDataSpec
from experiments.benchmarks.shared import append_row, free_memory, optimizer_state_bytes, peak_reserved_bytes, seconds

WARM, WINDOW, WINDOWS, ALONE, PROFILED = 6, 3, 4, 5, 2
LIMIT_S = 300.0
STRATEGIES = ("ddp", "fsdp")
TORCH, BAOC = "torch AdamW, fused", "BaocOptimizer"


def text(vocabulary: int, length: int) -> TextDataSpec:
    return TextDataSpec(dataset="random", vocab_size=vocabulary, sequence_length=length, num_train=0, num_val=1)


def images(size: int, classes: int) -> ImageDataSpec:
    return ImageDataSpec(dataset="random", image_size=size, channels=3, num_classes=classes, num_train=0, num_val=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """`batch`: samples of a rank in weak scaling, of all ranks in strong scaling, so that both are one at one rank."""

    family: str
    size: str
    data: TextDataSpec | ImageDataSpec
    batch: int

    def batches(self, samples: int, *, rank: int, device: torch.device) -> Callable[[], tuple[Tensor, Tensor]]:
        generator, data = torch.Generator(device).manual_seed(1 + rank), self.data
        given = {"generator": generator, "device": device}

        def draw() -> tuple[Tensor, Tensor]:
            if isinstance(data, TextDataSpec):
                tokens = torch.randint(data.vocab_size, (samples, data.sequence_length + 1), **given)
                return tokens[:, :-1], tokens[:, 1:].flatten()
            shape = (samples, data.channels, data.image_size, data.image_size)
            return torch.randn(shape, **given), torch.randint(data.num_classes, (samples,), **given)

        return draw


NETWORKS = {
    "llama-1b": Network(family="llama", size="1b", data=text(32_000, 1024), batch=8),
    "vit-l": Network(family="vit", size="large", data=images(224, 1000), batch=32),
    "llama-nano": Network(family="llama", size="nano", data=text(256, 64), batch=8),
    "vit-mini": Network(family="vit", size="mini", data=images(32, 10), batch=8),
}
OF_DEVICE = {"cuda": ("llama-1b", "vit-l"), "cpu": ("llama-nano", "vit-mini")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    network: str
    strategy: str
    scaling: str  # weak, which at one rank is strong, too
    ranks: int
    optimizer: str
    budget: str
    samples: int  # of a rank in a step
    samples_per_s: float  # of all ranks
    step_ms: float
    optimizer_ms: float
    collectives: float
    exposed: float | None
    peak_bytes: int
    peak_bytes_predicted: int | None
    excess: float | None  # of the peak over its prediction
    state_bytes: int  # of the rank that holds most
    plan: str  # digest of the spec of every block
    device: str
    torch: str
    commit: str


# -- one network, strategy, scaling and optimizer ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    part: str
    ranks: tuple[int, ...]
    device: str
    networks: tuple[str, ...]
    strategies: tuple[str, ...]
    budget: str
    ends: float  # time.time() after which no row is begun
    threads: int
    out: Path


def measured(network: Network, strategy: str, samples: int, name: str, *, device: torch.device, budget: str) -> Any:
    group, cuda = ranks(), device.type == "cuda"
    torch.manual_seed(0)
    with device:
        model: Any = build_model(network.family, spec=network.data, size=network.size, seed=0).to(device)
    if strategy == "fsdp":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if cuda else MixedPrecisionPolicy()
        mesh = init_device_mesh(device.type, (group.size,))
        for layer in recomputable_layers(model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    narrow = torch.autocast("cuda", torch.bfloat16) if cuda and strategy == "ddp" else nullcontext()
    draw = network.batches(samples, rank=group.rank, device=device)

    def micro_batch() -> None:
        inputs, targets = draw()
        with narrow:
            found = model(inputs)
        cross_entropy(found.flatten(0, -2).float(), targets).backward()

    given = {"lr": 1e-4, "weight_decay": 0.1}
    free_memory()
    if name == BAOC:
        optimizer: Any = BaocOptimizer(model, budget=budget, probe=micro_batch, verbose=False, **given)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **given)
    if strategy == "ddp" and group.size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def steps(count: int) -> None:
        for _ in range(count):
            micro_batch()
            optimizer.step()
            optimizer.zero_grad()

    if cuda:
        torch.cuda.reset_peak_memory_stats()
    steps(WARM)
    windows = [seconds(lambda: steps(WINDOW)) / WINDOW for _ in range(WINDOWS)]
    peak = peak_reserved_bytes(device)
    micro_batch()
    alone = median(seconds(optimizer.step) for _ in range(ALONE))
    optimizer.zero_grad()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        spent = seconds(lambda: steps(PROFILED))
    collectives, exposed = shares(profiler.events(), spent=spent, cuda=cuda)
    step_s, alone, peak, held = group.all_reduce_max(median(windows), alone, peak, optimizer_state_bytes(optimizer))
    predicted = optimizer.plan.peak_bytes if name == BAOC else 0
    specs = optimizer.specs if name == BAOC else {}
    return {
        "samples": samples, "samples_per_s": round(samples * group.size / step_s, 3),
        "step_ms": round(1e3 * step_s, 3), "optimizer_ms": round(1e3 * alone, 3), "collectives": collectives,
        "exposed": exposed, "peak_bytes": int(peak), "peak_bytes_predicted": predicted or None,
        "excess": round(peak / predicted - 1, 4) if predicted and peak else None, "state_bytes": int(held),
        "plan": hashlib.sha256(json.dumps(specs, sort_keys=True).encode()).hexdigest()[:12] if specs else "",
    }  # fmt: skip


def shares(events: Iterable[Any], *, spent: float, cuda: bool) -> tuple[float, float | None]:
    """Of `spent` seconds, those in a collective, and on a GPU those in which nothing else runs."""
    if cuda:  # kernels and copies, without ranges that code has named
        kernels = [event for event in events if event.device_type.name == "CUDA"]
        events = [event for event in kernels if not event.is_user_annotation]
    mark = "nccl" if cuda else "gloo:"
    spans = [(event.time_range.start, event.time_range.end, event.name.startswith(mark)) for event in events]
    sent = covered((begin, end) for begin, end, sends in spans if sends)
    share = round(sent / 1e6 / spent, 4)
    if not cuda:
        return share, None
    others = covered((begin, end) for begin, end, sends in spans if not sends)
    either = covered((begin, end) for begin, end, _ in spans)
    return share, round((either - others) / 1e6 / spent, 4)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


# -- the parts, in each of a number of processes ----------------------------------------------------------------------


def steps_part(asked: Asked, *, device: torch.device, place: dict[str, Any]) -> None:
    group = ranks()
    for scaling in ("weak", "strong")[: group.size]:
        for name in asked.networks:
            network = NETWORKS[name]
            samples = network.batch // (1 if scaling == "weak" else group.size)
            for strategy in asked.strategies:
                for optimizer in (TORCH, BAOC):
                    if group.broadcast_number(time.time() > asked.ends):
                        return
                    given = {"device": device, "budget": asked.budget}
                    found = measured(network, strategy, samples, optimizer, **given)
                    free_memory()
                    told = {"network": name, "strategy": strategy, "scaling": scaling, "optimizer": optimizer}
                    budget = asked.budget if optimizer == BAOC else ""
                    kept(asked.out / "scaling.csv", Row(ranks=group.size, budget=budget, **told, **found, **place))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Steps of matrices of one shape by Muon under fully_shard."""

    matrices: str
    ranks: int
    messages: int  # of all-to-all in the last step
    sent_bytes: int  # in them, by the rank that sends most
    floor_bytes: int
    over_floor: float | None
    difference: float  # of the update from one rank's, as a share of its norm
    device: str
    torch: str
    commit: str


MATRICES = {  # number, shape
    "cuda": ((24, (2048, 2048)), (48, (5461, 2048)), (9, (2047, 2048))),
    "cpu": ((8, (64, 64)), (8, (176, 64)), (3, (70, 48))),
}
MUON_STEPS = 3
MUON_DIFFERENCE = 0.01  # at most; rows on CPUs have up to .003


def muon_part(asked: Asked, *, device: torch.device, place: dict[str, Any], beside: Path) -> None:
    group = ranks()
    for num, shape in MATRICES[device.type]:
        torch.manual_seed(0)
        module = nn.Module()
        for index in range(num):
            module.register_parameter(f"w{index}", nn.Parameter(torch.randn(shape, device=device) * 0.02))
        start = [param.detach().clone() for param in module.parameters()]
        fully_shard(module, mesh=init_device_mesh(device.type, (group.size,)))
        optimizer = BlockwiseOptimizer(module, "muon_int8", lr=1e-2, backend="fused")
        sent: list[int] = []
        send = ShardGroup.all_to_all

        def exchange(self: ShardGroup, parts: Tensor, *, into: Tensor, sent=sent, send=send) -> Tensor:
            sent.append(parts.nbytes * (self.size - 1) // self.size)
            return send(self, parts, into=into)

        ShardGroup.all_to_all = exchange
        for step in range(MUON_STEPS):
            sent.clear()
            generator = torch.Generator(device).manual_seed(step)
            for param in module.parameters():
                assert isinstance(param, DTensor)
                grad = torch.randn(shape, generator=generator, device=device)
                param.grad = distribute_tensor(grad, param.device_mesh, param.placements)
            optimizer.step()
        ShardGroup.all_to_all = send
        weights, path = optimizer.export_weights(), beside / f"muon_{num}_{shape[0]}.pt"
        if group.size == 1:
            torch.save(weights, path)
        alone = torch.load(path, map_location=device)
        updates = [
            ((weights[name].to(device) - value).norm() / (value - first).norm())
            for (name, value), first in zip(alone.items(), start, strict=True)
        ]
        (most,) = group.all_reduce_max(sum(sent))
        floor = 2 * num * shape[0] * shape[1] * 2 * (group.size - 1) / group.size**2
        row = Exchange(
            matrices=f"{num} of {shape[0]} x {shape[1]}", ranks=group.size, messages=len(sent),
            sent_bytes=int(most), floor_bytes=round(floor), over_floor=round(most / floor, 4) if floor else None,
            difference=max(map(float, updates)), **place,
        )  # fmt: skip
        kept(asked.out / "scaling_muon.csv", row)


def kept(path: Path, row: Any) -> None:
    """Adds a row to a table of this call, on rank 0, and says it."""
    if ranks().rank:
        return
    append_row(path, row)
    print(row, flush=True)


def process(rank: int, size: int, folder: Path, asked: Asked) -> None:
    warnings.filterwarnings("ignore")
    cuda = asked.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        use_expandable_segments(device)
        context_bytes(device)
    torch.set_num_threads(asked.threads)
    given = {"init_method": f"file://{folder / f'store{size}'}", "timeout": timedelta(seconds=LIMIT_S)}
    dist.init_process_group(
        "nccl" if cuda else "gloo", rank=rank, world_size=size, device_id=device if cuda else None, **given
    )
    warm_up_communicator(device)
    name = torch.cuda.get_device_name(device) if cuda else f"CPU, {asked.threads} threads a rank"
    place = {"device": name, "torch": torch.__version__, "commit": commit()}
    if asked.part == "muon":
        muon_part(asked, device=device, place=place, beside=folder)
    else:
        steps_part(asked, device=device, place=place)
    dist.destroy_process_group()


# -- a study ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    number: int
    state: str
    ranks: int | None
    devices: str
    began_s: float
    seconds: float
    commit: str


def study_part(out: Path, *, device: str, num: int = 8, cards: int = 8, of_trial: int = 2) -> int:
    """Trials on pretended devices: 1 where one lacks its ranks, or two that run at once share a device, else 0."""
    from baoc.sweep import study as module
    from baoc.sweep.gpu_slots import Gpu, GpuSlots
    from baoc.sweep.study_config import read_study
    from baoc.sweep.trial_process import TrialProcess

    began: list[tuple[float, str, set[str]]] = []

    class Noted(TrialProcess):
        def __init__(self, overrides: Sequence[str], *, folder: Path, variables: Any = None, **given: Any):
            began.append((time.time(), folder.name, set(variables["CUDA_VISIBLE_DEVICES"].split(","))))
            super().__init__(overrides, folder=folder, variables=variables, **given)

    module.TrialProcess = Noted
    module.find_gpus = lambda _: tuple(Gpu(name=str(i), total_bytes=24 << 30, uuid=f"GPU-{i}") for i in range(cards))
    fixed = ["model=vit", "model.size=tiny", "dataset=synthetic_images", f"device={device}", "trainer.max_steps=20"]
    fixed += ["budget=state_25", "checkpoint.export=false", "trainer.limit_val_batches=1"]
    config = read_study(
        {
            "name": "scaling", "objectives": {"quality": "minimize", "state_bytes": "minimize"},
            "space": {"optim.lr": {"low": 1e-4, "high": 1e-2, "log": True}}, "sampler": "random", "n_trials": num,
            "workers": cards // of_trial, "gpus_per_trial": of_trial, "fixed": fixed,
        }
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        module.GpuSlots = partial(GpuSlots, folder=Path(folder) / "slots")  # beside those of devices that are there
        start = time.time()
        trials = module.run_study(config, folder=Path(folder) / "study").trials
        ended = {f"{trial.number:04d}": trial for trial in trials}
        rows, faults = [], sum(trial.state.name != "COMPLETE" for trial in trials)
        for at, name, devices in began:
            result = Path(folder) / "study" / name / "result.json"
            count = json.loads(result.read_text())["num_ranks"] if result.is_file() else None
            until = ended[name].datetime_complete.timestamp()
            held = [
                device
                for first, other, each in began
                if other != name and first <= at < ended[other].datetime_complete.timestamp()
                for device in each
            ]
            faults += count != of_trial or len(devices) != of_trial or bool(devices & set(held))
            rows.append(
                TrialRow(
                    number=int(name), state=ended[name].state.name, ranks=count, devices=" ".join(sorted(devices)),
                    began_s=round(at - start, 2), seconds=round(until - at, 2), commit=commit(),
                )
            )  # fmt: skip
    (out / "scaling_study.csv").unlink(missing_ok=True)
    for row in rows:
        kept(out / "scaling_study.csv", row)
    most = max(sum(row.began_s <= at.began_s < row.began_s + row.seconds for row in rows) for at in rows)
    print(f"{len(rows)} trials of {of_trial} of {cards} pretended devices, {most} at once, {faults} faults")
    return int(faults > 0)


# -- the table --------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines())) if path.is_file() else []


def table(path: Path) -> int:
    """Prints scaling.csv in short, and what is wrong in it: 1 then, and without a row, else 0."""
    rows = read(path)
    print(f"\n{'network':11}{'':5}{'scaling':8}{'ranks':>5} {'optimizer':19}{'samples/s':>10}{'effic.':>7}{'opt ms':>8}"
          f"{'coll.':>7}{'exposed':>8}{'peak GiB':>9}{'excess':>8} plan")  # fmt: skip
    alone = {
        (row["network"], row["strategy"], row["optimizer"]): float(row["samples_per_s"])
        for row in rows
        if row["ranks"] == "1"
    }
    plans: dict[tuple[str, str], dict[str, str]] = {}
    wrong = [] if rows else ["no row was written"]
    for row in rows:
        one = alone.get((row["network"], row["strategy"], row["optimizer"]))
        efficiency = "" if one is None else f"{float(row['samples_per_s']) / int(row['ranks']) / one:.3f}"
        excess = f"{float(row['excess']):+.1%}" if row["excess"] else ""
        exposed = f"{float(row['exposed']):.1%}" if row["exposed"] else ""
        where = f"{row['network']:11}{row['strategy']:5}{row['scaling']:8}{row['ranks']:>5} {row['optimizer']:19}"
        print(
            f"{where}{float(row['samples_per_s']):10.1f}{efficiency:>7}{float(row['optimizer_ms']):8.2f}"
            f"{float(row['collectives']):7.1%}{exposed:>8}"
            f"{int(row['peak_bytes']) / 2**30:9.2f}{excess:>8} {row['plan']}"
        )
        if row["excess"] and float(row["excess"]) > 0:
            wrong.append(f"above its prediction: {where}")
        if row["plan"]:
            plans.setdefault((row["network"], row["strategy"]), {})[f"{row['ranks']} ({row['scaling']})"] = row["plan"]
    for (network, strategy), found in plans.items():
        same = len(set(found.values())) == 1
        print(f"{network} {strategy}: plans at {', '.join(found)} ranks are {'the same' if same else 'DIFFERENT'}")
        wrong += [] if same else [f"plans differ: {network} {strategy}"]
    print("\n".join(wrong))
    return int(bool(wrong))


def exchanges(path: Path) -> int:
    """1 where a row of scaling_muon.csv has updates too far from one rank's, and without a row, else 0."""
    rows = read(path)
    wrong = [row for row in rows if not float(row["difference"]) <= MUON_DIFFERENCE]
    print("\n".join(f"updates are not those of one rank: {row}" for row in wrong) if rows else "no row was written")
    return int(bool(wrong) or not rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the rows")
    parser.add_argument("--part", default="steps", choices=("steps", "muon", "study"))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--networks", nargs="+", choices=NETWORKS)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--budget", default="state_25", help="of BaocOptimizer")
    parser.add_argument("--seconds", type=float, default=1e9, help="no row is begun later than this")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.part == "study":
        return study_part(given.out, device="cpu")
    asked = Asked(
        part=given.part, ranks=tuple(given.ranks), device=given.device, strategies=tuple(given.strategies),
        networks=tuple(given.networks or OF_DEVICE[given.device]), budget=given.budget,
        ends=time.time() + given.seconds, out=given.out,
        threads=max(1, len(os.sched_getaffinity(0)) // max(given.ranks)),
    )  # fmt: skip
    path = given.out / ("scaling.csv" if given.part == "steps" else "scaling_muon.csv")
    path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for size in asked.ranks:
            if time.time() < asked.ends:
                args = (size, Path(folder), asked)
                spawn(process, args=args, nprocs=size)
    return table(path) if given.part == "steps" else exchanges(path)


if __name__ == "__main__":
    sys.exit(main())
