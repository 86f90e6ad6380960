"""Two GPUs: steps, peaks and states of BlockwiseOptimizer over fully_shard beside torch's fused AdamW over the same.

    torchrun --standalone --nproc-per-node 2 experiments/benchmarks/fsdp_steps.py
    # time not recorded, 2 H200s -> fsdp_steps.csv
    torchrun --standalone --nproc-per-node 2 experiments/benchmarks/fsdp_steps.py 1b --tries 2
    # the same -> fsdp_shares.csv

Rows are written as they come. Sizes (350m, 1b) may be named. A plain loop: bf16 in forward and backward, gradients
reduced in fp32, a full shard per layer. `step_ms` is the median over windows of 5 steps of the slowest rank,
`optimizer_ms` that of `optimizer.step()` alone on gradients that stay, `one_gpu_ms` the same of the whole network on
one GPU, and `over_share` the quotient of both where a rank's share of the network is 1. `--tries 5` times optimizers
alone instead, so often anew. There `_host_ms` is the median after which `step` returns, `_queued_ms` a step of 10 in a
row, where the host prepares one while the device is at the one before, as it does behind a backward, and
`over_share_queued` the quotient of these. `peak_bytes` is the largest of ranks, context included;
`peak_bytes_predicted` what a probe without optimizer states holds, and the states of a rank. `loss` is the mean over
ranks after the last step, on the same data for all rows of a network.
"""

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc.config.environment import commit
from baoc.core.catalogue import select
from baoc.core.statistics import mean_interval
from baoc.models import build_model
from baoc.optim import BlockwiseOptimizer
from baoc.optim.shards import warm_up_communicator
from baoc.parallel import ranks
from baoc.profiling import context_bytes, probe_footprint
from baoc.profiling.memory import use_expandable_segments
from baoc.profiling.step_temporaries import step_temporaries
from baoc.types import TextDataSpec
from experiments.benchmarks.shared import (
    free_memory,
    optimizer_state_bytes,
    peak_reserved_bytes,
    results_folder,
    seconds,
    write_rows,
)

WARM, WINDOW, WINDOWS, ALONE, QUEUED = 8, 5, 4, 10, 10
SEQUENCE, VOCABULARY = 1024, 32_000
SPEC = TextDataSpec(
    dataset="random", vocab_size=VOCABULARY, sequence_length=SEQUENCE, num_train=0, num_val=1, bytes_per_token=1.0
)
NETWORKS = {"350m": 8, "1b": 4}  # size -> sequences of a GPU
TORCH = "torch AdamW, fused"
MUON = "muon_int8, adamw_int8"  # hidden matrices, embedding and head
OPTIMIZERS = (TORCH, MUON, "adamw_int8", "adamw_int8+split8", "adamw", "adamw_int4", "lion_int8_root")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    network: str
    ranks: int
    optimizer: str
    step_ms: float
    ratio: float  # of step_ms to fused AdamW
    optimizer_ms: float
    one_gpu_ms: float
    over_share: float  # of optimizer_ms to a rank's share of one_gpu_ms
    peak_bytes: int
    peak_bytes_predicted: int
    excess: float  # of the peak over the prediction
    state_bytes: int
    loss: float
    device: str
    torch: str
    commit: str


def network(size: str, *, device: torch.device, narrow: bool) -> Any:
    torch.manual_seed(0)
    with device:
        model = build_model("llama", spec=SPEC, size=size, seed=0).to(device)
    return model.to(torch.bfloat16) if narrow else model


def sharded(model: Any) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.checkpoint_units:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def built(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == TORCH:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    hidden, ends = ("muon_int8", "adamw_int8") if name == MUON else (name, name)
    specs = {
        key: ends if param.ndim < 2 or "embed" in key or "lm_head" in key else hidden
        for key, param in model.named_parameters()
    }
    return BlockwiseOptimizer(model, specs, lr=1e-4, weight_decay=0.1)


def alone_ms(name: str, size: str, *, device: torch.device) -> float:
    """ms of an optimizer step of the whole network on this GPU."""
    model = network(size, device=device, narrow="+" in name)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer = built(name, model)
    for _ in range(WARM):
        optimizer.step()
    return 1e3 * median(seconds(optimizer.step) for _ in range(ALONE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One try of an optimizer: both networks made anew, and steps of one GPU and of a rank in turn."""

    network: str
    ranks: int
    optimizer: str
    number: int
    optimizer_ms: float
    one_gpu_ms: float
    over_share: float
    optimizer_host_ms: float
    one_gpu_host_ms: float
    optimizer_queued_ms: float
    one_gpu_queued_ms: float
    over_share_queued: float
    device: str
    torch: str
    commit: str


def share_of(name: str, size: str, *, device: torch.device) -> dict[str, float]:
    """Milliseconds of `optimizer` and `one_gpu`, medians over steps in turn, each of the slowest rank."""
    models = {
        "one_gpu": network(size, device=device, narrow="+" in name),
        "optimizer": sharded(network(size, device=device, narrow="+" in name)),
    }
    optimizers = {}
    for which, model in models.items():
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizers[which] = built(name, model)
    times: dict[str, list[float]] = defaultdict(list)
    for turn in range(WARM + ALONE):
        for which, optimizer in optimizers.items():
            host: list[float] = []

            def step(optimizer: torch.optim.Optimizer = optimizer, host: list[float] = host) -> None:
                begin = perf_counter()
                optimizer.step()
                host.append(1e3 * (perf_counter() - begin))

            dist.barrier()
            alone = 1e3 * seconds(step)
            dist.barrier()
            queued = 1e3 * seconds(lambda step=step: [step() for _ in range(QUEUED)]) / QUEUED
            for kind, spent in (("_ms", alone), ("_host_ms", host[0]), ("_queued_ms", queued)):
                times[which + kind] += [spent] if turn >= WARM else []
    found = {which: median(each) for which, each in times.items()}
    return dict(zip(found, (round(ms, 4) for ms in ranks().all_reduce_max(*found.values())), strict=True))


def shares(sizes: list[str], *, tries: int, device: torch.device, place: dict[str, Any], out: Path) -> None:
    rows: list[Share] = []
    for number in range(tries):
        for size in sizes:
            for name in (name for name in OPTIMIZERS if name != MUON):
                found = share_of(name, size, device=device)
                free_memory()
                given: dict[str, Any] = {"network": f"llama-{size}", "ranks": ranks().size, "optimizer": name}
                for kind in ("", "_queued"):
                    over = found[f"optimizer{kind}_ms"] * ranks().size / found[f"one_gpu{kind}_ms"]
                    given[f"over_share{kind}"] = round(over, 4)
                rows.append(Share(**given, **found, number=number, **place))
                if ranks().rank == 0:
                    write_rows(out, rows)
    if ranks().rank == 0:
        for network_, name in dict.fromkeys((row.network, row.optimizer) for row in rows):
            own = [row for row in rows if (row.network, row.optimizer) == (network_, name)]
            alone, queued = ([getattr(row, key) for row in own] for key in ("over_share", "over_share_queued"))
            told = f"alone {mean_interval(alone, level=0.95)}, queued {mean_interval(queued, level=0.95)}"
            host = ", ".join(
                f"{median(getattr(row, key) for row in own):.2f}" for key in ("optimizer_host_ms", "one_gpu_host_ms")
            )
            print(f"{network_:12} {name:20} over a share of one GPU's: {told}; host ms {host}")


def batches(size: str, *, rank: int, device: torch.device) -> Callable[[], Tensor]:
    generator = torch.Generator(device).manual_seed(1 + rank)
    shape = (NETWORKS[size], SEQUENCE + 1)
    return lambda: torch.randint(VOCABULARY, shape, generator=generator, device=device)


def measured(name: str, size: str, *, device: torch.device) -> dict[str, Any]:
    group = ranks()
    model = sharded(network(size, device=device, narrow="+" in name))
    draw = batches(size, rank=group.rank, device=device)

    def loss_of(tokens: Tensor) -> Tensor:
        return cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

    def micro_batch() -> None:
        loss_of(draw()).backward()

    free_memory()
    footprint = probe_footprint(list(model.parameters()), run_micro_batch=micro_batch)
    free_memory()
    optimizer = built(name, model)
    torch.cuda.reset_peak_memory_stats()
    times, loss = [], torch.zeros((), device=device)

    def steps(count: int) -> None:
        nonlocal loss
        for _ in range(count):
            loss = loss_of(draw())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(WARM)
    for _ in range(WINDOWS):
        times.append(1e3 * seconds(lambda: steps(WINDOW)) / WINDOW)
    peak = peak_reserved_bytes(device)
    last = loss.detach().float()
    dist.all_reduce(last)
    micro_batch()
    optimizer.step()
    alone = 1e3 * median(seconds(optimizer.step) for _ in range(ALONE))
    held, specs = optimizer_state_bytes(optimizer), set[str]()
    if isinstance(optimizer, BlockwiseOptimizer):
        specs = set(optimizer.specs.values())
        temporaries = step_temporaries(select(sorted(specs)).values(), params=list(model.parameters()))
        footprint = replace(footprint, step_temporary_bytes=temporaries)
    step_ms, optimizer_ms = group.all_reduce_max(median(times), alone)
    promised = footprint.peak_bytes(state_bytes=held, specs=sorted(specs))
    peak, predicted, held = (int(each) for each in group.all_reduce_max(peak, promised, held))
    return {
        "step_ms": round(step_ms, 3), "optimizer_ms": round(optimizer_ms, 3), "peak_bytes": peak,
        "peak_bytes_predicted": predicted, "excess": round(peak / predicted - 1, 4),
        "state_bytes": held, "loss": round(float(last) / group.size, 4),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sizes", nargs="*", default=list(NETWORKS))
    parser.add_argument("--tries", type=int, default=0, help="time optimizers alone instead, so often")
    asked = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    use_expandable_segments(device)
    context_bytes(device)
    dist.init_process_group("nccl", device_id=device)
    warm_up_communicator(device)
    out = results_folder()
    place = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__, "commit": commit()}
    if asked.tries:
        shares(asked.sizes, tries=asked.tries, device=device, place=place, out=out / "fsdp_shares.csv")
        return dist.destroy_process_group()
    rows: list[Row] = []
    measured(TORCH, "350m", device=device)  # kept nowhere: a process is slow at first
    free_memory()
    for size in asked.sizes:
        reference = 0.0
        for name in OPTIMIZERS:
            one = alone_ms(name, size, device=device)
            free_memory()
            found = measured(name, size, device=device)
            free_memory()
            reference = reference or found["step_ms"]
            ratio = round(found["step_ms"] / reference, 4)
            (one,) = ranks().all_reduce_max(one)
            given = {"network": f"llama-{size}", "ranks": ranks().size, "optimizer": name, "ratio": ratio, **place}
            over_share = round(found["optimizer_ms"] * ranks().size / one, 4)
            rows.append(Row(**given, one_gpu_ms=round(one, 3), over_share=over_share, **found))
            if ranks().rank == 0:
                print(rows[-1], flush=True)
                write_rows(out / "fsdp_steps.csv", rows)
    if ranks().rank == 0:
        print(f"\n{'network':12} {'optimizer':20} step ms  ratio  opt ms  /share  peak/predicted GiB  state GiB")
        for row in rows:
            peak, predicted, state = (
                each / 2**30 for each in (row.peak_bytes, row.peak_bytes_predicted, row.state_bytes)
            )
            print(
                f"{row.network:12} {row.optimizer:20} {row.step_ms:7.1f} {row.ratio:6.3f} {row.optimizer_ms:7.2f} "
                f"{row.over_share:6.2f} {peak:9.2f} /{predicted:6.2f} {state:9.2f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
