"""The fused backend against the eager one on the GPU, whole optimizers over many steps, CUDA graphs included.

    python experiments/benchmarks/engine_check.py  # 1 minute of an H200 -> printed

Most of the time is compiling. Each check is told apart; the exit code is the number that failed.
"""

import argparse
import copy
import gc
import io
import pickle
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc.errors import BadInputError
from baoc.kernels.triton import engine as engine_module
from baoc.optim import BlockwiseOptimizer

DEVICE, LR = "cuda", 1e-2
SHAPES = {
    "a": (96, 512), "b": (40,), "c": (4, 65), "d": (300, 700), "e": (1000,), "f": (64, 64), "g": (33,), "h": (128, 96),
}  # fmt: skip
MUON = {name: "muon_int8" if name in ("a", "d", "f", "h") else "adamw_int8" for name in SHAPES}
SPECS = {
    "a": "adamw", "b": "rmsprop_int8", "c": "lion_int8", "d": "adamw_int8_root", "e": "adamw_bf16", "f": "sign",
    "g": "signum_int8", "h": "adamw_int8",
}  # fmt: skip


def params_like(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {n: nn.Parameter(torch.randn(s, generator=generator).to(DEVICE, dtype)) for n, s in SHAPES.items()}


class Pair:
    """The same optimizer twice on the GPU, fused and eager."""

    def __init__(self, specs: object = SPECS, **settings: object):
        self.params = params_like(), params_like()
        self.fused, self.eager = (
            BlockwiseOptimizer([{"params": list(p.items())}], specs, lr=LR, weight_decay=0.1, backend=name, **settings)  # pyright: ignore
            for p, name in zip(self.params, ("fused", "eager"), strict=True)
        )
        self.random = torch.Generator().manual_seed(1)

    def give(self, *, in_place: bool = False, without: tuple[str, ...] = ()) -> None:
        for name, shape in SHAPES.items():
            grad = torch.randn(shape, generator=self.random).to(DEVICE)
            for params in self.params:
                param = params[name]
                if name in without:
                    param.grad = None
                elif in_place and param.grad is not None:
                    param.grad.copy_(grad)
                else:
                    param.grad = grad.to(param.dtype, copy=True)

    def step(self) -> None:
        self.fused.step()
        self.eager.step()

    def run(self, steps: int, **how: object) -> None:
        for _ in range(steps):
            self.give(**how)  # pyright: ignore[reportArgumentType]
            self.step()

    def check(self, *, within: float = 0.15, few: float = 2.5) -> float:
        """How many learning rates the weights are apart. All but one in 10^4 must be `within`; those `few` may be more,
        because a number on the boundary between two codes may take either, and v at code 1 of 255 instead of 2 doubles
        an update, in this step and in those that follow."""
        worst = 0.0
        for name, own in self.params[0].items():
            gaps = (own.detach().float() - self.params[1][name].detach().float()).abs() / LR
            gap, num = float(gaps.max()), int((gaps > within).sum())
            assert gap <= few, f"{name}: {gap:.2e} learning rates apart"
            assert num <= max(1, own.numel() // 10_000), f"{name}: {num} weights are more than {within} rates apart"
            worst = max(worst, gap)
            for key, value in self.fused.state[own].items():
                if key == "step":
                    assert torch.equal(value, self.eager.state[self.params[1][name]][key]), f"{name}: step counts"
        for block, live in self.fused.registry.live.items():
            match = self.eager.registry.live[block].match
            if live.match is not None and match is not None:
                torch.testing.assert_close(live.match, match, rtol=2e-2, atol=1e-6)
        return worst

    @property
    def graphs(self) -> list[object]:
        return graphs_of(self.fused)


def graphs_of(optimizer: BlockwiseOptimizer) -> list[object]:
    return [
        graph
        for backend in optimizer.registry.step_unit().self_excluding
        for graph in backend.engine.graphs._graphs.values()  # pyright: ignore[reportAttributeAccessIssue]
        if graph is not None
    ]


def use_graphs(optimizer: BlockwiseOptimizer, graphs: bool) -> None:
    for backend in optimizer.registry.step_unit().backends:  # those that are there from now on
        backend.graphs = graphs  # pyright: ignore[reportAttributeAccessIssue]


def mixed_specs_with_graphs() -> str:
    pair = Pair()
    for step in range(20):
        for optimizer in (pair.fused, pair.eager):
            optimizer.param_groups[0]["lr"] = LR * (1 + step % 5) / 5
        pair.run(1, in_place=step % 3 > 0)
    worst = pair.check()
    assert pair.graphs, "nothing was captured"
    assert pair.fused.registry.choices["a"].backend == "fused"
    return f"{worst:.1e} learning rates apart, {len(pair.graphs)} graph(s)"


def without_graphs() -> str:
    pair = Pair()
    use_graphs(pair.fused, False)
    pair.run(6)
    assert not pair.graphs
    return f"{pair.check():.1e} learning rates apart"


def graphs_equal_plain_launches(specs: object = SPECS) -> str:
    ends, captured = [], 0
    for graphs in (True, False):
        pair = Pair(specs)
        use_graphs(pair.fused, graphs)
        pair.run(8)
        assert bool(pair.graphs) is graphs
        captured += len(pair.graphs)
        ends.append([p.detach().clone() for p in pair.params[0].values()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True)), "a replay differs from plain launches"
    return f"bit for bit, {captured} graph(s)"


def muon_in_graphs_equals_plain_launches() -> str:
    return graphs_equal_plain_launches(MUON)


def late_gradients() -> str:
    pair = Pair()
    pair.run(4, without=("a", "c"))
    pair.run(4)
    pair.run(2, without=("b",))
    return f"{pair.check():.1e} learning rates apart"


def nonfinite_gradients() -> str:
    pair = Pair()
    for step in range(9):
        pair.give()
        if step in (2, 5, 7):
            for params in pair.params:
                params["a"].grad[0, ::7] = float("nan")  # pyright: ignore[reportOptionalSubscript]
                params["c"].grad[1, 3] = float("inf")  # pyright: ignore[reportOptionalSubscript]
                params["b"].grad[0] = -0.0  # pyright: ignore[reportOptionalSubscript]
        before = pair.params[0]["a"][0, 0].clone()
        if step > 3:
            pair.fused.mask_nonfinite()
            pair.eager.mask_nonfinite()
            for params in pair.params:
                nn.utils.clip_grad_norm_(params.values(), 100.0)
        pair.fused.step()
        pair.eager.step()
        assert step not in (2, 5, 7) or torch.equal(before, pair.params[0]["a"][0, 0])
    worst = pair.check()
    counts = pair.fused.num_nonfinite, pair.eager.num_nonfinite
    assert counts[0] == counts[1] > 0 and pair.fused.last_nonfinite == pair.eager.last_nonfinite, counts
    return f"{worst:.1e} learning rates apart, {counts[0]} elements"


def skipped_steps() -> str:
    pair = Pair(nonfinite="skip_step")
    pair.run(3)
    pair.give()
    before = pair.params[0]["b"].detach().clone()
    pair.params[0]["a"].grad[0, 0] = float("nan")  # pyright: ignore[reportOptionalSubscript]
    pair.fused.step()
    assert torch.equal(before, pair.params[0]["b"]) and pair.fused.num_skipped_steps == 1
    pair.run(3)
    return f"{pair.check():.1e} learning rates apart"


def split_weights() -> str:
    found = []
    for spec in ("adamw_int8+split8", "lion_int8+bf16_sr"):
        pair = Pair(spec)
        pair.run(10)
        found.append(f"{spec} {pair.check(within=2.5 if 'sr' in spec else 0.5):.1e}")
    return ", ".join(found)


def migration_and_checkpoints() -> str:
    pair = Pair()
    pair.run(4)
    for optimizer in (pair.fused, pair.eager):
        optimizer.migrate({"a": "rmsprop_int8", "b": "adamw", "d": "sign"})
    pair.run(4)
    pair.check()
    pair.fused.load_state_dict(pair.eager.state_dict())
    for name, param in pair.params[0].items():
        param.data.copy_(pair.params[1][name])
    pair.run(4)
    return f"{pair.check():.1e} learning rates apart"


def captured_by_the_user() -> str:
    """A step in a graph of the user's own is refused, and the next step is as if it had not been asked for."""
    pair = Pair()
    pair.run(3)
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            pair.fused.step()
    except BadInputError:
        pair.run(3)
        return f"refused, then {pair.check():.1e} learning rates apart"
    raise AssertionError("the step was captured")


def captured_while_python_collects() -> str:
    """Graphs of optimizers that are gone, in cycles, which Python's collector finds in the middle of a capture."""
    pair, dead = Pair(), [captured_nothing() for _ in range(4)]
    launch, thresholds = engine_module.launch, gc.get_threshold()

    def launch_and_leave_garbage(*table_and_call: Any) -> None:
        if dead:
            cycle: list[object] = [dead.pop()]
            cycle.append(cycle)
            del cycle
        kept = [[index] for index in range(5000)]  # makes the collector run, if it may
        launch(*table_and_call)
        assert kept

    engine_module.launch = launch_and_leave_garbage
    gc.set_threshold(100, 1, 1)
    try:
        pair.run(4)
    finally:
        engine_module.launch = launch
        gc.set_threshold(*thresholds)
    assert pair.graphs, "the capture failed"
    return f"{pair.check():.1e} learning rates apart"


def captured_nothing() -> torch.cuda.CUDAGraph:
    graph, one = torch.cuda.CUDAGraph(), torch.zeros(1, device=DEVICE)
    with torch.cuda.graph(graph):
        one.add_(1)
    return graph


def a_loop_as_training_is() -> str:
    """Autocast, new gradients in each step, non-finite ones marked before clipping, and a profiler for some steps."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(8192, 256), nn.GELU())
    net = nn.Sequential(net, nn.Linear(256, 10)).to(DEVICE)
    optimizer = BlockwiseOptimizer(net, "adamw_int8", lr=1e-3, backend="fused")
    images, labels = torch.randn(64, 3, 16, 16).pin_memory(), torch.randint(10, (64,), device=DEVICE)
    first = loss = torch.zeros(())
    for step in range(30):
        with torch.profiler.profile() if step in (3, 4, 20) else nullcontext():
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = nn.functional.cross_entropy(net(images.to(DEVICE, non_blocking=True)), labels)
            loss.backward()
            optimizer.mask_nonfinite()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        first = loss.detach() if step == 0 else first
    graphs = graphs_of(optimizer)
    assert graphs and float(loss.detach()) < 0.5 * float(first)
    return f"loss {float(first):.2f} to {float(loss.detach()):.2f}, {len(graphs)} graph(s)"


def copies() -> str:
    """deepcopy, pickle and torch.save go on as the optimizer does."""
    pair = Pair()
    pair.run(4)
    buffer = io.BytesIO()
    torch.save((pair.params[0], pair.fused), buffer)
    buffer.seek(0)
    twins = [torch.load(buffer, weights_only=False), copy.deepcopy((pair.params[0], pair.fused))]
    twins.append(pickle.loads(pickle.dumps((pair.params[0], pair.fused))))
    pair.give()
    for params, optimizer in twins:
        for name, param in params.items():
            grad = pair.params[0][name].grad
            param.grad = None if grad is None else grad.clone()
        optimizer.step()
    pair.step()
    for params, _ in twins:
        assert all(torch.equal(param, pair.params[0][name]) for name, param in params.items())
    return f"{pair.check():.1e} learning rates apart"


def every_rule_counts_what_is_not_finite() -> str:
    """Exactly, in whole and in padded programs, marked before and not; and the elements stay as they are."""
    specs = (
        "adamw", "adamw_int8", "adamw_int8+split8", "adamw_int4", "sign", "adamw_shared_in_int8", "adamw_shared_out",
        "adafactor", "adafactor_momentum_int8", "foam_l1_int8", "foam_l2_int8", "foam_l3_int8",
    )  # fmt: skip
    for spec in specs:
        params = [nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in ((64, 512), (130, 258), (512, 64))]
        optimizer = BlockwiseOptimizer([(f"p{i}", p) for i, p in enumerate(params)], spec, lr=LR, backend="fused")
        wanted = 0
        for step in range(6):
            bad = [torch.rand(param.shape, device=DEVICE) < 0.01 for param in params]
            before = [param.detach().clone() for param in params]
            for param, where in zip(params, bad, strict=True):
                param.grad = torch.randn_like(param).masked_fill_(where, float("nan"))
                wanted += int(where.sum())
            if step % 2:
                optimizer.mask_nonfinite()
            optimizer.step()
            same = [torch.equal(p[w], b[w]) for p, w, b in zip(params, bad, before, strict=True)]
            assert all(same), f"{spec}: an excluded weight moved in step {step}"
        assert optimizer.num_nonfinite == wanted, f"{spec}: {optimizer.num_nonfinite} of {wanted} were counted"
    return f"{len(specs)} specs"


def one_launch_per_spec() -> str:
    """Counted by the profiler: kernels of a step do not grow with tensors. Blocks whose update is matched are stepped
    twice, as what was stepped by a wrong factor is repaired."""
    pair = Pair()
    matched = {spec for spec in SPECS.values() if not spec.startswith("adamw")}
    pair.run(6)
    pair.give()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        pair.fused.step()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() or ()]
    steps = [name for name in names if "step_kernel" in name]
    assert len(steps) == len(set(SPECS.values())) + len(matched), names
    return f"{len(steps)} step kernels, {len(names)} operations in all"


CHECKS: tuple[Callable[[], str], ...] = (
    mixed_specs_with_graphs, without_graphs, graphs_equal_plain_launches, muon_in_graphs_equals_plain_launches,
    late_gradients, nonfinite_gradients, skipped_steps, split_weights, migration_and_checkpoints, captured_by_the_user,
    captured_while_python_collects, a_loop_as_training_is, copies, every_rule_counts_what_is_not_finite,
    one_launch_per_spec,
)  # fmt: skip


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    failed = 0
    for check in CHECKS:
        try:
            print(f"ok      {check.__name__}: {check()}", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED  {check.__name__}: {traceback.format_exc(limit=-4)[-1500:]}", flush=True)
    print(f"{len(CHECKS) - failed} of {len(CHECKS)} checks of the fused backend passed")
    sys.exit(failed)


if __name__ == "__main__":
    main()
