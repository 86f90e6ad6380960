"""Many runs of one task at once: replicas of a network are one batched network, their blocks one optimizer's.

A run on its own leaves most of a GPU idle. Here the weights of all replicas lie stacked, vmap makes each layer one
product of matrices by replica, and one BlockwiseOptimizer steps the blocks of all, one parameter group for each
replica, rate and betas. A replica sees nothing of others: gradients are clipped for each by itself.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from baoc.core.catalogue import SPECS
from baoc.core.recipes import Recipe, recipe_keys
from baoc.optim import BlockwiseOptimizer
from baoc.planning.allocators.recipe import pick_spec
from baoc.planning.planner import Planner, PlannerSettings
from baoc.profiling.describe import describe
from baoc.types import Block, Budget
from experiments.benchmarks.recipe_lists import BETA1, CLIP, FLOOR, MATCHING, WARMUP, WEIGHT_DECAY
from experiments.benchmarks.role_tasks import Task, attend_replicas, for_replicas, stacked_plan

PAD = 64  # elements between replicas of a tensor, so that each begins aligned


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training. `factor` multiplies the task's rate, `multiples` (role -> multiple) that of some blocks."""

    phase: str
    label: str
    recipe: Recipe
    factor: float
    seed: int
    beta2: float = 0.999
    role: str = ""
    spec: str = ""
    role_factor: float = 1.0
    multiples: Mapping[str, float] = field(default_factory=dict[str, float])
    plan: Mapping[str, str] | None = None  # block -> spec, in place of the recipe


@dataclass(slots=True, kw_only=True)
class Result:
    run: Run
    value: float = math.nan
    accuracy: float = math.nan
    choice: float = math.nan
    looks: dict[int, float] = field(default_factory=dict[int, float])  # percent of the steps -> choice
    state_bytes: int = 0
    state_fraction: float = math.nan
    seconds: float = 0.0
    works: bool = False


def schedule(step: int, steps: int) -> float:
    """Share of the rate: up over a tenth of the steps, then a cosine down to a tenth of it."""
    warm = max(1, int(WARMUP * steps))
    if step < warm:
        return (step + 1) / warm
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


@contextmanager
def replicas_attend() -> Any:
    own, F.scaled_dot_product_attention = F.scaled_dot_product_attention, attend_replicas
    try:
        yield
    finally:
        F.scaled_dot_product_attention = own


class Bench:
    """A task with its network's blocks, and first weights by seed."""

    def __init__(self, task: Task):
        self.task = task
        torch.manual_seed(0)
        plain = task.build()
        self.planner = Planner(
            describe(plain),
            budget=Budget(name="all", state_fraction=1.0),
            settings=PlannerSettings(risk="prior", allocator="uniform_adamw", blocks_by="layer_part"),
            declared=plain.parameter_blocks() if hasattr(plain, "parameter_blocks") else None,  # pyright: ignore
        )
        self.blocks: tuple[Block, ...] = tuple(self.planner.blocks)
        self.model = for_replicas(plain).to(task.device)
        self.shapes = {name: param.shape for name, param in self.model.named_parameters()}
        self.numel = sum(shape.numel() for shape in self.shapes.values())
        self._weights: dict[int, dict[str, Tensor]] = {}

    def weights(self, seed: int) -> dict[str, Tensor]:
        if seed not in self._weights:
            torch.manual_seed(seed)
            fresh = self.task.build().named_parameters()
            self._weights[seed] = {name: param.detach().to(self.task.device) for name, param in fresh}  # pyright: ignore
        return self._weights[seed]

    @property
    def roles(self) -> list[str]:
        """Roles of the blocks, the most special name of each, without `first`."""
        return list(dict.fromkeys(next(key for key in recipe_keys(block) if key != "first") for block in self.blocks))

    def specs(self, run: Run) -> dict[str, str]:
        if run.plan is not None:
            return dict(run.plan)
        return {block.name: pick_spec(block, recipe=run.recipe).spec for block in self.blocks}

    def runs_spec(self, run: Run) -> bool:
        """Whether the spec of a replaced role runs on some block of it."""
        specs = self.specs(run)
        return any(run.role in recipe_keys(block) and specs[block.name] == run.spec for block in self.blocks)


class Replicas:
    """The runs of a list under way together."""

    def __init__(self, bench: Bench, runs: Sequence[Run], *, steps: int, lr: float, graphed: bool = False):
        self.bench, self.task, self.runs, self.steps = bench, bench.task, list(runs), steps
        self.lr = lr
        device = self.task.device
        self.device = device
        seeds = sorted({run.seed for run in runs})
        self.of = torch.tensor([seeds.index(run.seed) for run in runs], device=device)
        self.plan = stacked_plan(self.task, seeds, steps)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.stacks: dict[str, Tensor] = {}
        self.grads: dict[str, Tensor] = {}
        own: list[dict[str, Any]] = [{} for _ in runs]
        for name, shape in bench.shapes.items():
            numel = shape.numel()
            room = torch.zeros(2, len(runs), -(-numel // PAD) * PAD, device=device)
            held, grads = (part[:, :numel].unflatten(1, shape) for part in room)
            for index, run in enumerate(runs):
                held[index].copy_(bench.weights(run.seed)[name])
                param = torch.nn.Parameter(held[index])
                param.grad = grads[index]
                own[index][name] = param
            self.stacks[name], self.grads[name] = held.requires_grad_(), grads
        self.own = own
        self.optimizer = self._optimizer(own)
        self.losses = torch.zeros(len(runs), device=device)
        self.graph: Any = None
        if graphed:
            self._capture()

    def _optimizer(self, own: Sequence[Mapping[str, Any]]) -> BlockwiseOptimizer:
        groups: list[dict[str, Any]] = []
        blocks: list[Block] = []
        specs: dict[str, str] = {}
        for index, (run, params) in enumerate(zip(self.runs, own, strict=True)):
            chosen = self.bench.specs(run)
            members: dict[tuple[float, tuple[float, float]], list[str]] = {}
            for block in self.bench.blocks:
                spec = chosen[block.name]
                key = (_multiple(run, block), _betas(run, SPECS[spec].rule))
                members.setdefault(key, []).extend(info.name for info in block.params)
                infos = tuple(replace(info, name=f"{index}.{info.name}", aliases=()) for info in block.params)
                blocks.append(replace(block, name=f"{index}.{block.name}", params=infos))
                specs[blocks[-1].name] = spec
            for (multiple, betas), names in members.items():
                groups.append(
                    {
                        "params": [(f"{index}.{name}", params[name]) for name in names],
                        "lr": 0.0,
                        "betas": betas,
                        "own": self.lr * run.factor * multiple,
                    }
                )
        return BlockwiseOptimizer(
            groups, specs, blocks=blocks, lr=self.lr, weight_decay=WEIGHT_DECAY, rms_matching=MATCHING
        )

    # -- a step -----------------------------------------------------------------------------------------------------

    def _forward_backward(self) -> None:
        """Gradients of the coming step of every replica, clipped."""
        step = {name: held.index_select(1, self.at)[:, 0][self.of] for name, held in self.plan.items()}
        seen = self.task.seen(step)
        with replicas_attend():
            losses = vmap(lambda weights, own: self.task.loss(self.bench.model, weights, own))(self.stacks, seen)
        grads = torch.autograd.grad(losses.sum(), list(self.stacks.values()))
        squares = torch.stack([grad.flatten(1).square().sum(1) for grad in grads]).sum(0)
        scale = (CLIP / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        scaled = [grad * scale.view(-1, *(1,) * (grad.ndim - 1)) for grad in grads]
        torch._foreach_copy_(list(self.grads.values()), scaled)  # pyright: ignore[reportPrivateImportUsage]
        self.losses.copy_(losses.detach())
        self.at.add_(1)

    def _capture(self) -> None:
        side = torch.cuda.Stream(priority=-1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._forward_backward()
        torch.cuda.current_stream().wait_stream(side)
        self.at.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            self._forward_backward()
        self.graph = graph
        self.at.zero_()

    def step(self, number: int) -> None:
        share = schedule(number, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group["own"] * share
        if self.graph is not None:
            self.graph.replay()
        else:
            self._forward_backward()
        self.optimizer.step()

    # -- the whole --------------------------------------------------------------------------------------------------

    def train(self, *, go_on: Callable[[int], bool] = lambda _: True) -> list[Result]:
        """Results of all; none if `go_on` said no. It is asked every 50 steps, with the number of steps made."""
        begun = time.time()
        looks = {max(1, self.steps * percent // 100): percent for percent in (25, 50)}
        found: dict[int, Tensor] = {}
        self.bench.model.train()
        for number in range(self.steps):
            self.step(number)
            if number + 1 in looks:
                found[looks[number + 1]] = self.evaluate("choice")[:, 0]
            if number % 50 == 49:
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                if not go_on(number + 1):
                    return []
        told = {part: self.evaluate(part).tolist() for part in ("choice", "report")}
        early = {percent: held.tolist() for percent, held in found.items()}
        by_block = self.optimizer.block_state_bytes()
        results = []
        for index, run in enumerate(self.runs):
            value, accuracy = told["report"][index]
            choice = told["choice"][index][0]
            bytes_ = sum(by_block[f"{index}.{block.name}"] for block in self.bench.blocks)
            results.append(
                Result(
                    run=run, value=value, accuracy=accuracy, choice=choice,
                    looks={percent: held[index] for percent, held in early.items()},
                    state_bytes=bytes_,
                    state_fraction=round(bytes_ / self.bench.planner.state_bytes_adamw, 5),
                    seconds=round((time.time() - begun) / len(self.runs), 3),
                    works=math.isfinite(value) and max(value, choice) < self.task.ceiling,
                )
            )  # fmt: skip
        return results

    @torch.no_grad()
    def evaluate(self, part: str) -> Tensor:
        """[replicas, 2]: value and accuracy."""
        self.bench.model.eval()
        judged = []
        with replicas_attend():
            for seen in self.task.held(part):
                each = {name: held.expand(len(self.runs), *held.shape) for name, held in seen.items()}
                judge = vmap(lambda weights, own: self.task.judge(self.bench.model, weights, own))
                judged.append(judge(self.stacks, each))
        self.bench.model.train()
        return torch.stack(judged).mean(0)


def _multiple(run: Run, block: Block) -> float:
    return next((run.multiples[key] for key in recipe_keys(block) if key in run.multiples), 1.0)


def _betas(run: Run, rule: str) -> tuple[float, float]:
    tuned = run.recipe.betas
    for name in (rule, rule.partition("_")[0]):
        if name in tuned:
            return tuned[name]
    return (BETA1, run.beta2)
