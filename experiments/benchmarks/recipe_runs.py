"""One run of recipe_study.py: a network that stays where it is, a recipe's optimizer, and a step that asks nothing of
the host. Several runs of a process go on at once, each on a stream of its own."""

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baoc.core.catalogue import SPECS
from baoc.optim import BlockwiseOptimizer
from baoc.planning.candidates import applies
from baoc.planning.planner import Planner, PlannerSettings
from baoc.profiling.describe import describe
from baoc.types import Budget
from experiments.benchmarks.recipe_lists import BASE_LR, BETA1, CLIP, FLOOR, MATCHING, RECIPES, WARMUP, WEIGHT_DECAY
from experiments.benchmarks.recipe_tasks import PARTS, TASKS, Plan


class Job(NamedTuple):
    phase: str
    task: str
    recipe: str
    beta2: float
    factor: float
    seed: int
    steps: int

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(map(str, self))


@dataclass(slots=True, kw_only=True)
class Row:
    """One run. `choice` chooses among settings, `value` is told; _25 and _50 are after that share of the steps."""

    phase: str
    task: str
    recipe: str
    beta2: float
    factor: float
    seed: int
    steps: int
    lr: float
    status: str
    value: float = math.nan
    accuracy: float = math.nan
    choice: float = math.nan
    value_25: float = math.nan
    value_50: float = math.nan
    choice_25: float = math.nan
    choice_50: float = math.nan
    params: int = 0
    state_bytes: int = 0
    state_fraction: float = math.nan
    nonfinite: int = 0
    train_s: float = 0.0
    graphed: bool = False
    note: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(str(getattr(self, name)) for name in Job._fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    device: str
    tasks: tuple[str, ...]
    recipes: tuple[str, ...]
    fashion: Path | None
    tiny: bool
    slots: int
    end: float


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# -- one network and its step -----------------------------------------------------------------------------------------


class Rig:
    """A network whose tensors stay where they are, with what each of at most `steps` steps sees, for run after run.

    The step's number lies on the device and is counted there, so that a captured step reads its own data.
    """

    def __init__(self, task: Any, *, steps: int, graphed: bool):
        self.task, self.device = task, task.device
        self.model = task.build().to(self.device)
        self.params = list(self.model.parameters())
        self.plan = {
            name: torch.zeros((steps, *sample.shape[1:]), dtype=sample.dtype, device=self.device)
            for name, sample in task.plan(torch.Generator().manual_seed(0), 1).items()
        }
        self.at = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.graph: Any = None
        self.last_loss: Tensor | None = None
        if graphed:
            self._capture()

    @torch.no_grad()
    def begin(self, weights: Sequence[Tensor], plan: Plan) -> None:
        for param, weight in zip(self.params, weights, strict=True):
            param.copy_(weight)
        for name, held in plan.items():
            self.plan[name][: len(held)].copy_(held)
        self.at.zero_()
        self.model.train()

    def step(self) -> None:
        """Gradients of the coming step, clipped."""
        if self.graph is not None:
            self.graph.replay()
            return
        self._drop_gradients()
        self.last_loss = self._forward_backward()

    def _forward_backward(self) -> Tensor:
        loss = self.task.loss(self.model, {name: held.index_select(0, self.at)[0] for name, held in self.plan.items()})
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.params, CLIP)
        self.at.add_(1)
        return loss.detach()

    def _drop_gradients(self) -> None:
        for param in self.params:
            param.grad = None

    def _capture(self) -> None:
        """As torch describes it: some steps on another stream, then the capture, which makes the gradients. A replay
        writes them anew, so nobody may drop or zero them.

        No other capture may have that stream: cuBLAS has one workspace per stream, so graphs that were captured on the
        same one write over each other's. Streams without priority come round again after 32; nobody else has priority.
        """
        side = torch.cuda.Stream(priority=-1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._drop_gradients()
                self._forward_backward()
                self.at.zero_()
        torch.cuda.current_stream().wait_stream(side)
        self._drop_gradients()
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        gc.disable()  # graphs of finished optimizers must not be freed while this one is captured
        try:
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                self.last_loss = self._forward_backward()
        finally:
            gc.enable()
        self.graph = graph
        torch.cuda.synchronize()


class Bench:
    """What one process makes once: data, first weights, plans of data and of specs."""

    def __init__(self, options: Options):
        self.options, self.device = options, torch.device(options.device)
        self._made: dict[Any, Any] = {}

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
            wait(self.device)  # runs on other streams read it too
        return self._made[key]

    def task(self, name: str) -> Any:
        tiny, fashion = self.options.tiny, self.options.fashion
        return self._once(name, lambda: TASKS[name](self.device, tiny=tiny, fashion=fashion))

    def weights(self, name: str, seed: int) -> list[Tensor]:
        def make() -> list[Tensor]:
            torch.manual_seed(seed)
            return [param.detach().to(self.device) for param in self.task(name).build().parameters()]

        return self._once(("weights", name, seed), make)

    def plan(self, job: Job) -> Plan:
        generator = torch.Generator().manual_seed(1000 + job.seed)
        return self._once(
            ("plan", job.task, job.seed, job.steps), lambda: self.task(job.task).plan(generator, job.steps)
        )

    def specs(self, rig: Rig, recipe: str) -> tuple[Planner, dict[str, str]]:
        return self._once(("specs", rig.task.name, recipe), lambda: specs_of(rig.model, recipe))

    def optimizer(self, rig: Rig, job: Job) -> BlockwiseOptimizer:
        planner, specs = self.specs(rig, job.recipe)
        return BlockwiseOptimizer(
            rig.model,
            specs,
            blocks=planner.blocks,
            lr=BASE_LR * job.factor,
            betas=(BETA1, job.beta2),
            weight_decay=WEIGHT_DECAY,
            rms_matching=MATCHING,
        )


def specs_of(model: torch.nn.Module, recipe: str) -> tuple[Planner, dict[str, str]]:
    """Block -> spec; AdamW where the recipe's does not apply."""
    listed = RECIPES[recipe]
    fraction = listed if isinstance(listed, float) else 1.0
    planner = Planner(
        describe(model),
        budget=Budget(name=recipe, state_fraction=fraction),
        settings=PlannerSettings(risk="prior", allocator="exact"),
    )
    if isinstance(listed, float):
        return planner, dict(planner.propose().allocation.choices)
    hidden, outer = listed
    by_role = {"embedding": outer, "head": outer, "norm": "adamw"}
    specs = {}
    for block in planner.blocks:
        spec = SPECS[by_role.get(block.role.value, hidden)]
        specs[block.name] = "adamw" if applies(block, spec=spec, rule=planner.rules[spec.rule]) else spec.name
    return planner, specs


def schedule(step: int, steps: int) -> float:
    """Share of the rate: up over a tenth of the steps, then a cosine down to a tenth of it."""
    warm = max(1, int(WARMUP * steps))
    if step < warm:
        return (step + 1) / warm
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def train(bench: Bench, rig: Rig, job: Job) -> Iterator[None]:
    """Yields after each step; returns the Row. Nothing waits for the device before the end."""
    begun = time.time()
    rig.begin(bench.weights(job.task, job.seed), bench.plan(job))
    optimizer = bench.optimizer(rig, job)
    lr = BASE_LR * job.factor
    looks = {max(1, job.steps // 4): "_25", max(1, job.steps // 2): "_50", job.steps: ""}
    found: dict[str, Tensor] = {}
    for step in range(job.steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * schedule(step, job.steps)
        rig.step()
        optimizer.step()
        if step + 1 in looks:
            found |= {part + looks[step + 1]: told for part, told in evaluate(rig).items()}
        yield
    values = {name: told.tolist() for name, told in found.items()}
    value, choice = values["report"][0], values["choice"][0]
    works = math.isfinite(value) and math.isfinite(choice) and max(value, choice) < rig.task.ceiling
    planner, _ = bench.specs(rig, job.recipe)
    return Row(
        **job._asdict(),
        lr=lr,
        status="finite" if works else "diverged",
        value=value,
        accuracy=values["report"][1],
        choice=choice,
        **{name.replace("report", "value"): told[0] for name, told in values.items() if "_" in name},
        params=sum(param.numel() for param in rig.params),
        state_bytes=optimizer.state_bytes(),
        state_fraction=round(optimizer.state_bytes() / planner.state_bytes_adamw, 5),
        nonfinite=optimizer.num_nonfinite,
        train_s=round(time.time() - begun, 2),
        graphed=rig.graph is not None,
    )


@torch.no_grad()
def evaluate(rig: Rig) -> dict[str, Tensor]:
    rig.model.eval()
    told = {part: rig.task.evaluate(rig.model, part) for part in PARTS}
    rig.model.train()
    return told


class Slot:
    """One run under way on a stream of its own, and the rigs it has used."""

    def __init__(self, bench: Bench, *, graphed: dict[str, bool], steps: dict[str, int]):
        self.bench, self.graphed, self.steps = bench, graphed, steps
        self.cuda = bench.device.type == "cuda"
        self.stream = torch.cuda.Stream() if self.cuda else None
        self.rigs: dict[str, Rig] = {}
        self.job: Job | None = None
        self._run: Iterator[None] | None = None
        self._marks: list[Any] = []  # behind the last two steps

    def context(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream) if self.cuda else nullcontext()

    @property
    def ready(self) -> bool:
        """Whether the device has come to the last step but one, so that the next is not queued for long."""
        return len(self._marks) < 2 or self._marks[0].query()

    def start(self, job: Job) -> None:
        self.job, self._run, self._marks = job, None, []

    def advance(self) -> Row | None:
        """One step of the run; its row if that was the end."""
        assert self.job is not None
        with self.context():
            try:
                if self._run is None:
                    self._run = train(self.bench, self._rig(self.job.task), self.job)
                next(self._run)
            except StopIteration as stop:
                self.job = self._run = None
                return stop.value
            if self.cuda:
                self._marks = [*self._marks[-1:], torch.cuda.Event()]
                self._marks[-1].record()
        return None

    def fail(self, error: Exception) -> Row:
        assert self.job is not None
        job, self.job, self._run = self.job, None, None
        note = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
        return Row(**job._asdict(), lr=BASE_LR * job.factor, status="error", note=note)

    def _rig(self, task: str) -> Rig:
        if task not in self.rigs:
            self.rigs[task] = Rig(self.bench.task(task), steps=self.steps[task], graphed=self.graphed[task])
        return self.rigs[task]
