"""What does each rule do in each role? Replacements in a lean Muon recipe, whole recipes and mixtures, paired by seed.

    python -m experiments.benchmarks.role_study OUT --data FOLDER --seconds 520
    # 9 minutes (--seconds) of an H200 -> rows_TASK.csv
    python -m experiments.benchmarks.role_study OUT --data FOLDER --phases rates again --tasks language --size 6m
    # 6 minutes of an H200 -> rows_language.csv

FOLDER holds package_text.xz (experiments/analysis/package_text.py) and fashion_mnist.npz (arrays train_images,
train_labels, test_images, test_labels of Debian's dataset-fashion-mnist). One process per task trains the product's
smallest network of its family, all runs of a list at once (role_runs.py). Lists were fixed before their first run, in
recipe_lists.py, those of `attention` and `queries` after `again` had been seen; `--phases` names them, in their order:

- `rates`: whole recipes at six rates on two seeds, which choose each recipe's rate;
- `roles`: on other seeds, the base at its best rate, one role of it replaced, every whole recipe at its own best rate
  (rows of phase `whole`), and mixtures of several roles (`mixture`);
- `confirm`, on eight seeds that chose nothing: AdamW at five rates, whole recipes, and choices by budget, their
  permutations and random plans;
- `beta2`, on the same seeds: AdamW's beta2 at three rates;
- `again`, with `--size`: the replacements that recipes are made of, at another size than the table's;
- `attention`: other rules and rates of queries and keys, of values and outputs, and of both;
- `queries`: rules and rates of queries and keys on fresh seeds, also at larger sizes;
- `long`: eight times the steps.

Rates come from `--rows`, of a call before, where `rates` is not among the phases; what --rows has is not run again.
Rows go to OUT/rows_TASK.csv when a list has ended. Runs on a CPU too (`--size test --device cpu`), to try it.
"""

import argparse
import csv
import json
import multiprocessing as mp
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from baoc.core.recipes import RECIPES, Recipe, recipe_from_node
from experiments.benchmarks import shared
from experiments.benchmarks.recipe_lists import (
    AGAIN_LOW,
    AGAIN_SPECS,
    AGAIN_WHOLE,
    ATTENTION,
    BETA2_FACTORS,
    BETA2_WHOLE,
    BUDGETS,
    CONFIRM_FACTORS,
    CONFIRM_WHOLE,
    HIDDEN_SPECS,
    LONG_BATCHES,
    LONG_RUNS,
    LONG_STEPS,
    MIXTURE_SEED,
    MORE_WHOLE,
    NUM_MIXTURES,
    QUERIES,
    QUERIES_FACTORS,
    ROLE_BASE,
    ROLE_FACTORS,
    ROLE_LRS,
    ROLE_MULTIPLES,
    ROLE_SEEDS,
    ROLE_SPECS,
    ROLE_STEPS,
    WHOLE,
)

PHASES = ("rates", "roles", "confirm", "beta2", "again", "attention", "queries", "long")
COLUMNS = (
    "phase", "family", "task", "size", "steps", "label", "role", "spec", "factor", "lr", "seed", "value", "choice",
    "state_bytes", "state_fraction", "status", "recipe", "rate_factor", "multiples", "beta2", "accuracy", "choice_25",
    "choice_50", "seconds",
)  # fmt: skip
CHECKED, TOLERANCE = 12, 0.02  # steps, and the relative difference of losses, of graphs and plain launches


def whole_recipes() -> dict[str, Recipe]:
    return {name: RECIPES[name] for name in WHOLE} | {
        name: recipe_from_node(node, name=name) for name, node in MORE_WHOLE.items()
    }


def rate_runs(
    seeds: Sequence[int],
    *,
    phase: str = "rates",
    recipes: Sequence[str] | None = None,
    factors: Sequence[float] = ROLE_FACTORS,
) -> list[Any]:
    from experiments.benchmarks.role_runs import Run

    return [
        Run(phase=phase, label=f"{name}@{factor:g}", recipe=recipe, factor=factor, seed=seed)
        for seed in seeds
        for factor in factors
        for name, recipe in whole_recipes().items()
        if recipes is None or name in recipes
    ]


def role_runs(bench: Any, *, best: Mapping[str, float], seed: int) -> list[Any]:
    """The list of one seed; `best` is the factor of each whole recipe."""
    from experiments.benchmarks.role_runs import Run

    runs = replacements(bench, factor=best[ROLE_BASE], seed=seed, phase="roles", specs=ROLE_SPECS)
    runs += whole_runs(tuple(whole_recipes()), best=best, seed=seed)
    base, factor = RECIPES[ROLE_BASE], best[ROLE_BASE]
    for number, (specs, multiples) in enumerate(mixtures(bench.roles)):
        recipe = replaced(base, specs)
        runs.append(
            Run(phase="mixture", label=f"mixture{number}", recipe=recipe, factor=factor, seed=seed, multiples=multiples)
        )
    return runs


def whole_runs(names: Sequence[str], *, best: Mapping[str, float], seed: int) -> list[Any]:
    from experiments.benchmarks.role_runs import Run

    return [
        Run(phase="whole", label=name, recipe=whole_recipes()[name], factor=best[name], seed=seed)
        for name in names
        if name != ROLE_BASE and name in best
    ]


def replacements(bench: Any, *, factor: float, seed: int, phase: str, specs: Mapping[str, Sequence[str]]) -> list[Any]:
    """The base, and the base with one role replaced by each of its `specs`."""
    from experiments.benchmarks.role_runs import Run

    base = RECIPES[ROLE_BASE]
    runs = [Run(phase=phase, label="base", recipe=base, factor=factor, seed=seed)]
    for role in (*bench.roles, *(("first",) if "first" in specs else ())):
        for spec in specs.get(role, specs["hidden"]):
            for multiple in ROLE_MULTIPLES:
                if phase == "again" and spec.startswith("muon") and multiple != 1:
                    continue  # phase `attention` has those
                run = Run(
                    phase=phase, label=f"{role}={spec}@{multiple:g}", recipe=replaced(base, {role: spec}),
                    factor=factor, seed=seed, role=role, spec=spec, role_factor=multiple, multiples={role: multiple},
                )  # fmt: skip
                same = multiple == 1 and bench.specs(run) == bench.specs(runs[0])
                if bench.runs_spec(run) and not same:
                    runs.append(run)
    return runs


def attention_runs(bench: Any, *, best: Mapping[str, float], seed: int) -> list[Any]:
    """The base, `ATTENTION`, and whole recipes at lower rates than those of phase `rates`."""
    from experiments.benchmarks.role_runs import Run

    base, factor = RECIPES[ROLE_BASE], best[ROLE_BASE]
    runs = [Run(phase="attention", label="base", recipe=base, factor=factor, seed=seed)]
    for chosen in ATTENTION:
        specs = {role: spec for role, (spec, _) in chosen.items()}
        multiples = {role: multiple for role, (_, multiple) in chosen.items()}
        label = ",".join(f"{role}={spec}@{multiple:g}" for role, (spec, multiple) in chosen.items())
        recipe = replaced(base, specs)
        runs.append(Run(phase="attention", label=label, recipe=recipe, factor=factor, seed=seed, multiples=multiples))
    if bench.task.size != "6m":
        return runs
    return runs + [
        Run(phase="attention", label=f"{name}@{low:g}", recipe=whole_recipes()[name], factor=low, seed=seed)
        for name, factors in AGAIN_LOW.items()
        for low in factors
    ]


def query_runs(bench: Any, *, seed: int) -> list[Any]:
    """`QUERIES` for queries and keys; Muon at multiple 1 is the base itself."""
    from experiments.benchmarks.role_runs import Run

    base, role = RECIPES[ROLE_BASE], "attention_qk"
    return [
        Run(
            phase="queries", label=f"{role}={spec}@{multiple:g},factor={factor:g}", recipe=replaced(base, {role: spec}),
            factor=factor, seed=seed, role=role, spec=spec, role_factor=multiple, multiples={role: multiple},
        )
        for factor in QUERIES_FACTORS.get(bench.task.size, (1.0,))
        for spec, multiple in QUERIES
    ]  # fmt: skip


def replaced(base: Recipe, specs: Mapping[str, str]) -> Recipe:
    return replace(base, specs={**base.specs, **specs})


def mixtures(roles: Sequence[str]) -> list[tuple[dict[str, str], dict[str, float]]]:
    """Role -> spec and role -> multiple of each; the draw is the same in every process and on every machine."""
    drawn = random.Random(MIXTURE_SEED)
    found = []
    for _ in range(NUM_MIXTURES):
        specs = {role: drawn.choice(ROLE_SPECS.get(role, HIDDEN_SPECS)) for role in roles}
        multiples = {
            role: 1.0 if spec.startswith("muon") else drawn.choice(ROLE_MULTIPLES) for role, spec in specs.items()
        }
        found.append((specs, multiples))
    return found


def best_factors(results: Sequence[Any]) -> dict[str, float]:
    """Recipe -> the factor with the least mean of `choice`; runs that did not work count as infinitely bad."""
    held: dict[str, dict[float, list[float]]] = {}
    for result in results:
        choice = result.choice if result.works else float("inf")
        held.setdefault(result.run.recipe.name, {}).setdefault(result.run.factor, []).append(choice)
    return {name: min(factors, key=lambda f: mean(factors[f])) for name, factors in held.items()}


# -- rows -------------------------------------------------------------------------------------------------------------


def row_of(result: Any, bench: Any, *, steps: int, lr: float) -> dict[str, Any]:
    run = result.run
    return {
        "phase": run.phase, "family": bench.task.family, "task": bench.task.name, "size": bench.task.size,
        "steps": steps, "label": run.label, "role": run.role, "spec": run.spec,
        "factor": run.role_factor if run.role else run.factor, "lr": lr * run.factor, "seed": run.seed,
        "value": round(result.value, 6), "choice": round(result.choice, 6), "state_bytes": result.state_bytes,
        "state_fraction": result.state_fraction, "status": "finite" if result.works else "diverged",
        "recipe": json.dumps(by_role(bench, run), separators=(",", ":")), "rate_factor": run.factor,
        "multiples": json.dumps(dict(run.multiples), separators=(",", ":")) if run.multiples else "",
        "beta2": run.beta2, "accuracy": round(result.accuracy, 5), "choice_25": round(result.looks.get(25, 0.0), 6),
        "choice_50": round(result.looks.get(50, 0.0), 6), "seconds": result.seconds,
    }  # fmt: skip


def by_role(bench: Any, run: Any) -> dict[str, str]:
    """Role -> the spec that its blocks run, the first layer's apart where they differ."""
    from baoc.core.recipes import recipe_keys

    specs = bench.specs(run)
    found: dict[str, str] = {}
    for block in sorted(bench.blocks, key=lambda block: block.depth == 0):
        keys = list(recipe_keys(block))
        role = next(key for key in keys if key != "first")
        if found.setdefault(role, specs[block.name]) != specs[block.name]:
            found[f"first.{role}"] = specs[block.name]
    return found


class Writer:
    def __init__(self, path: Path):
        self._file = path.open("w", newline="")
        self._writer: Any = csv.DictWriter(self._file, COLUMNS)
        self._writer.writeheader()

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._writer.writerows(rows)
        self._file.flush()


# -- one process per task ---------------------------------------------------------------------------------------------


def prepare() -> None:
    import torch

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True


class Study:
    """The lists of one task, until the time is over."""

    def __init__(self, task_name: str, given: argparse.Namespace, end: float, graphed: bool):
        import torch

        from experiments.benchmarks.role_runs import Bench
        from experiments.benchmarks.role_tasks import SIZES, TASKS

        self.name, self.given, self.end, self.graphed = task_name, given, end, graphed
        device = torch.device(given.device)
        self.bench = Bench(TASKS[task_name](device, data=given.data, size=given.size or SIZES[task_name]))
        self.lr = ROLE_LRS[task_name]
        self.writer = Writer(given.out / f"rows_{task_name}.csv")
        self.cost = 0.0  # seconds of a step and run, of the list before

    def train(self, runs: Sequence[Any], *, steps: int) -> list[Any]:
        """Results of a list, written; none where it would not have ended in time."""
        from experiments.benchmarks.role_runs import Replicas

        runs = runs[: self.given.limit]
        begun = time.time()
        need = 0.7 * self.cost * steps * len(runs)  # others may have ended since
        if begun + need > self.end:
            self.say(f"no time for {len(runs)} runs of {steps} steps, which would take {need:.0f} s")
            return []
        replicas = Replicas(self.bench, runs, steps=steps, lr=self.lr, graphed=self.graphed)
        built = time.time()

        def go_on(done: int) -> bool:
            spent = time.time() - built
            if done in (50, 200) or done % 1000 == 0:
                self.say(f"{done} of {steps} steps of {len(runs)} runs, {1e3 * spent / done:.1f} ms each")
            if time.time() > self.end:
                self.say(f"{len(runs)} runs given up after {done} of {steps} steps")
                return False
            return True

        results = replicas.train(go_on=go_on)
        spent = time.time() - built
        if results:
            self.cost = 1.05 * spent / steps / len(runs)
        self.writer.add([row_of(result, self.bench, steps=steps, lr=self.lr) for result in results])
        failed = sum(not result.works for result in results)
        self.say(f"{len(results)} runs in {built - begun:.1f} + {spent:.1f} s, {failed} of them diverged")
        del replicas
        _free()
        return results

    def say(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {self.name}: {text}", flush=True)


def _free() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def study_roles(name: str, given: argparse.Namespace, end: float, graphed: bool) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = given.gpus[list(ROLE_LRS).index(name) % len(given.gpus)]
    prepare()
    study = Study(name, given, end, graphed)
    rows = read_rows(given.rows, name, size=study.bench.task.size) if given.rows else []
    best = known_factors(rows)
    done = {(row["phase"], row["label"], int(row["seed"])) for row in rows}
    steps = given.steps or ROLE_STEPS
    for phase in given.phases:
        if phase == "rates":
            recipes = given.recipes if set(given.phases) <= {"rates", "again"} else None  # others look up every rate
            if not (rated := study.train(rate_runs(ROLE_SEEDS["rates"], recipes=recipes), steps=steps)):
                return
            best = dict.fromkeys(whole_recipes(), 1.0) if given.limit else best_factors(rated)
        study.say("best factors " + " ".join(f"{recipe}:{factor:g}" for recipe, factor in best.items()))
        for runs in lists_of(phase, study.bench, best=best, choices=given.choices):
            left = [run for run in runs if (run.phase, run.label, run.seed) not in done]
            left = [run for run in left if given.recipes is None or run.recipe.name in given.recipes]
            left = [run for run in left if given.seeds is None or run.seed in given.seeds]
            if left:
                study.train(left, steps=(given.steps or given.long_steps) if phase == "long" else steps)


def lists_of(phase: str, bench: Any, *, best: Mapping[str, float], choices: Path | None) -> list[list[Any]]:
    """Of a phase after `rates`: runs that train together."""
    if phase == "roles":
        return [role_runs(bench, best=best, seed=seed) for seed in ROLE_SEEDS["roles"]]
    if phase == "again":
        lists = []
        for seed in ROLE_SEEDS["again"]:
            lists.append(
                replacements(bench, factor=best[ROLE_BASE], seed=seed, phase="again", specs=AGAIN_SPECS)
                + whole_runs(AGAIN_WHOLE, best=best, seed=seed)
            )
        return [[*lists[0], *lists[1]], [*lists[2], *lists[3]]]
    if phase == "queries":
        return [[run for seed in ROLE_SEEDS["queries"] for run in query_runs(bench, seed=seed)]]
    if phase == "attention":
        seeds = ROLE_SEEDS["attention"]
        return [[run for seed in seeds for run in attention_runs(bench, best=best, seed=seed)]]
    if phase == "confirm":
        assert choices is not None, "phase `confirm` takes --choices"
        chosen = json.loads(choices.read_text())[bench.task.family]
        seeds = ROLE_SEEDS["confirm"]
        return [[run for seed in seeds for run in confirm_runs(bench, best=best, choices=chosen, seed=seed)]]
    if phase == "beta2":
        return [rate_runs(ROLE_SEEDS["confirm"], phase="beta2", recipes=BETA2_WHOLE, factors=BETA2_FACTORS)]
    return [long_runs(best, seeds=seeds) for seeds in LONG_BATCHES] if phase == "long" else []


def read_rows(rows: Path, task: str, *, size: str) -> list[dict[str, str]]:
    """Rows of a task at a size; to try the script, size "test" takes those of any."""
    return [row for row in shared.read_rows(rows) if row["task"] == task and size in ("test", row["size"])]


def known_factors(rows: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """As `best_factors`, from rows of phase `rates` of a call before."""
    held: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        if row["phase"] == "rates":
            choice = float(row["choice"]) if row["status"] == "finite" else float("inf")
            name = row["label"].partition("@")[0]
            held.setdefault(name, {}).setdefault(float(row["factor"]), []).append(choice)
    return {name: min(factors, key=lambda f: mean(factors[f])) for name, factors in held.items()}


def confirm_runs(bench: Any, *, best: Mapping[str, float], choices: Mapping[str, Any], seed: int) -> list[Any]:
    """AdamW at five rates, whole recipes at their best, choices and their permutations, a random plan by budget.

    A choice without a factor runs at the best one of `muon8_lean_m90`.
    """
    from experiments.benchmarks.role_runs import Run

    recipes, drawn = whole_recipes(), random.Random(MIXTURE_SEED + seed)
    adamw = recipes["adamw"]
    runs = [
        Run(phase="confirm", label=f"adamw@{factor:g}", recipe=adamw, factor=factor, seed=seed)
        for factor in CONFIRM_FACTORS
    ]
    runs += [
        Run(phase="confirm", label=name, recipe=recipes[name], factor=best[name], seed=seed) for name in CONFIRM_WHOLE
    ]
    held = [(bench.specs(run), run.recipe.betas, run.factor) for run in runs]
    for name, choice in choices.items():
        recipe = recipe_from_node({**choice["recipe"], "betas": choice["betas"]}, name=f"choice_{name}")
        factor = choice["factor"] or best["muon8_lean_m90"]
        chosen = Run(phase="confirm", label=recipe.name, recipe=recipe, factor=factor, seed=seed)
        specs = bench.specs(chosen)
        if (specs, recipe.betas, factor) in held:  # what is chosen at several budgets, or a whole recipe, runs once
            continue
        held.append((specs, recipe.betas, factor))
        runs.append(chosen)
        permuted = permutation(bench, specs, drawn)
        if permuted != specs:
            runs.append(replace(chosen, label=f"permuted_{name}", plan=permuted))
    for budget in BUDGETS:
        plan = random_plan(bench, limit=budget / 100, drawn=drawn)
        runs.append(Run(phase="confirm", label=f"random_{budget}", recipe=adamw, factor=1.0, seed=seed, plan=plan))
    return runs


def permutation(bench: Any, specs: Mapping[str, str], drawn: random.Random) -> dict[str, str]:
    """The same specs on other blocks of equal size, as far as they apply there."""
    by_size: dict[tuple[int, bool], list[str]] = {}
    for block in bench.blocks:
        outer = block.role.value in ("embedding", "head")
        by_size.setdefault((block.numel, outer), []).append(block.name)
    found = dict(specs)
    for names in by_size.values():
        mixed = [specs[name] for name in names]
        drawn.shuffle(mixed)
        found.update(zip(names, mixed, strict=True))
    return found


def random_plan(bench: Any, *, limit: float, drawn: random.Random) -> dict[str, str]:
    """Block -> a spec at random of those that apply, until what all keep is within `limit` of fp32 AdamW's state."""
    from baoc.core.catalogue import SPECS
    from baoc.core.rule_tags import RULE_INFOS
    from baoc.planning.candidates import why_inapplicable
    from baoc.planning.cost import state_bytes

    names = sorted({spec for listed in ROLE_SPECS.values() for spec in listed} - {"column_norm_momentum_int8"})
    allowed = {
        block.name: [
            (name, state_bytes(block, spec=SPECS[name], rule=rule))
            for name in names
            for rule in (RULE_INFOS[SPECS[name].rule],)
            if why_inapplicable(block, spec=SPECS[name], rule=rule) is None
        ]
        for block in bench.blocks
    }
    plan = {block: drawn.choice(rows) for block, rows in allowed.items()}
    while sum(size for _, size in plan.values()) > limit * bench.planner.state_bytes_adamw:
        block = drawn.choice(list(plan))
        other = drawn.choice(allowed[block])
        if other[1] <= plan[block][1]:
            plan[block] = other
    return {block: spec for block, (spec, _) in plan.items()}


def long_runs(best: Mapping[str, float], *, seeds: Sequence[int]) -> list[Any]:
    from experiments.benchmarks.role_runs import Run

    recipes = whole_recipes()
    return [
        Run(phase="long", label=f"{name}@{best[name] * of:g}", recipe=recipes[name], factor=best[name] * of, seed=seed)
        for seed in seeds
        for name, multiples in LONG_RUNS.items()
        for of in multiples
    ]


# -- before -----------------------------------------------------------------------------------------------------------


def compile_specs(specs: Sequence[str], device: str) -> None:
    """Kernels of these specs, so that processes that come later find them compiled."""
    import torch

    from baoc.optim import BlockwiseOptimizer
    from experiments.benchmarks.recipe_lists import MATCHING

    prepare()
    for spec in specs:
        for shapes in ([(96, 96), (256, 96)], [(96,)]):
            params = [(f"{i}", torch.nn.Parameter(torch.randn(s, device=device))) for i, s in enumerate(shapes)]
            try:
                optimizer = BlockwiseOptimizer(params, spec, rms_matching=MATCHING)
                for _ in range(3):
                    for _, param in params:
                        param.grad = torch.randn_like(param)
                    optimizer.step()
            except Exception as error:
                if len(shapes) > 1:
                    print(f"{spec}: {type(error).__name__}: {error}"[:200], flush=True)


def check_graph(task: str, given: argparse.Namespace, graphed: Any, place: int) -> None:
    """Whether a captured step gives the losses of plain launches."""
    import torch

    from experiments.benchmarks.role_runs import Bench, Replicas
    from experiments.benchmarks.role_tasks import SIZES, TASKS

    os.environ["CUDA_VISIBLE_DEVICES"] = given.gpus[place % len(given.gpus)]
    prepare()
    bench = Bench(TASKS[task](torch.device(given.device), data=given.data, size=given.size or SIZES[task]))
    runs = [run for run in rate_runs((1,)) if run.factor == 1 and run.recipe.name in ("adamw", "muon8_lean", "scale8")]
    curves = []
    for on in (False, True):
        begun = time.time()
        replicas = Replicas(bench, runs, steps=CHECKED, lr=ROLE_LRS[task], graphed=on)
        losses = []
        for number in range(CHECKED):
            replicas.step(number)
            losses.append(replicas.losses.clone())
        curves.append(torch.stack(losses))
        told = f"{curves[-1][0].tolist()} to {curves[-1][-1].tolist()}"
        print(f"{task}: graph {on}: losses {told} in {time.time() - begun:.1f} s", flush=True)
    apart = ((curves[0] - curves[1]).abs() / curves[0]).max().item()
    graphed[place] = int(apart < TOLERANCE)
    print(f"{task}: graph and plain launches {apart:.2%} apart", flush=True)


def compile_all(given: argparse.Namespace, graphed: Any) -> None:
    specs = {spec for listed in ROLE_SPECS.values() for spec in listed}
    if given.choices:
        held = json.loads(given.choices.read_text()).values()
        specs |= {
            spec
            for budgets in held
            for choice in budgets.values()
            for spec in choice["recipe"].values()
            if isinstance(spec, str)
        }
    specs |= {spec for recipe in whole_recipes().values() for spec in (*recipe.specs.values(), *recipe.fallback)}
    if given.recipes:
        specs = {row for name in given.recipes for row in whole_recipes()[name].all_specs}
        if {"again", "attention", "queries"} & set(given.phases):
            specs |= {spec for listed in AGAIN_SPECS.values() for spec in listed}
    ordered, spawn = sorted(specs), mp.get_context("spawn")
    parts = [ordered[place :: given.compilers] for place in range(given.compilers)]
    workers = [spawn.Process(target=compile_specs, args=(part, given.device), daemon=True) for part in parts]
    wanted = given.tasks if given.graphs == "on" else []
    checks = [(task, given, graphed, list(ROLE_LRS).index(task)) for task in wanted]
    workers += [spawn.Process(target=check_graph, args=check, daemon=True) for check in checks]
    for worker in workers:
        worker.start()
    until = time.time() + 90
    for worker in workers:
        worker.join(max(0.0, until - time.time()))
        if worker.is_alive():
            worker.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=["rates", "roles"])
    parser.add_argument("--recipes", nargs="+", help="only those of a list")
    parser.add_argument("--seeds", type=int, nargs="+", help="only those of a list")
    parser.add_argument("--rows", type=Path, help="of a call before: its best rates count, its runs are not run again")
    parser.add_argument("--choices", type=Path, help="family -> budget -> recipe, factor, betas, of phase `confirm`")
    parser.add_argument("--long-steps", type=int, default=LONG_STEPS)
    parser.add_argument("--gpus", nargs="+", default=["0"], help="of language, vision, diffusion, in turn")
    parser.add_argument("--seconds", type=float, default=520)
    parser.add_argument("--tasks", nargs="+", choices=list(ROLE_LRS), default=list(ROLE_LRS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", help="instead of each task's own; test is for trying")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--limit", type=int, help="of the runs of a list: to try it")
    parser.add_argument("--graphs", choices=["on", "off"], default="on")
    parser.add_argument("--compilers", type=int, default=14)
    given = parser.parse_args()
    end = time.time() + given.seconds
    given.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    spawn = mp.get_context("spawn")
    graphed = spawn.Array("i", len(ROLE_LRS))
    if given.device.startswith("cuda"):
        compile_all(given, graphed)
        print(f"{time.strftime('%H:%M:%S')} kernels are compiled, {end - time.time():.0f} s left", flush=True)
    on = {task: bool(graphed[place]) for place, task in enumerate(ROLE_LRS)}
    workers = [spawn.Process(target=study_roles, args=(task, given, end, on[task])) for task in given.tasks]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
