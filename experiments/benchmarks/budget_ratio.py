"""What a budget buys: samples per second of BAOC and of fp32 AdamW in the same memory, and Llama 350M in 4 GiB.

    python experiments/benchmarks/budget_ratio.py OUT --steps 8
    # 4 minutes (--seconds) of an H200 -> ratio.csv, options.csv
    python experiments/benchmarks/budget_ratio.py OUT --search 18 --steps 12 --seconds 500
    # 8 minutes of an H200 -> search.csv
    python experiments/benchmarks/budget_ratio.py OUT --beside --steps 12 --warm 4
    # 4 minutes of an H200 -> deciding.csv

Leaves OUT/ratio.csv with a row per case, written when it ends, and OUT/options.csv with every option of every decision.
A case is a run of an experiment in a process of its own, under the cap of its budget, forked from one that has imported
what runs need. fp32 AdamW stands beside it three times: with every option that the experiment has and its own best one
(`*_adamw`), the same with all activations kept (`*_adamw_kept`), and kept as autocast makes them (`*_adamw_autocast`).
`*_recomputed`, `*_some` and `*_kept` pin what is to be compared, and take fewer seconds to decide. The last lines are a
table of what each case decided and measured.

`--search S` holds decisions against an exhaustive search: each case is decided with no decision of it in the cache,
then for S seconds every option that fits and was not tried is tried, those first that promise most; then a new process
decides again, as the cache has it, and trains. OUT/ratio.csv has the seconds of both decisions (`decide_s`, `total_s`
in `deciding`, of which `training_s` compiled what training runs), the rates of the chosen and the best option as tried,
and what is untried; OUT/search.csv each option. `--first` decides each case anew without a search, and trains; with
`--stacks [NAME...]` each process leaves what it spent its seconds in, in OUT/NAME.stacks.txt.

`--beside` tells what deciding costs: each case is decided anew, with no code that compilers kept, and trains; then
three processes run until their first step has ended: one that finds the decision (kept), and two that are given what
was decided, with the code that compilers kept (given) and without (cold). OUT/deciding.csv has the seconds of each from
its configuration to the end of its first step, and those of its decision by phase. What a decision takes beyond the
same run without one is first - cold, and kept - given.
"""

import argparse
import csv
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from experiments.benchmarks.shared import write_rows
from experiments.benchmarks.stacks import sampled

ADAMW = ("allocator=uniform_adamw",)
KEPT = (*ADAMW, "model.checkpointing=false")
AUTOCAST = (*KEPT, "model.activations=null")
RECOMPUTED = ("micro_batch=128", "model.checkpointing=true", "optim.release_gradients=true")
COMPILED = "model.compile=true"
LARGE = ("llama_1b_8gb", "llama_3b_16gb", "llama_7b_24gb")  # where states decide; beside them, llama_peers.py
VIT, DIT, LLAMA = (f"experiments={name}" for name in ("vit_l16_8gb", "dit_xl2_16gb", "llama_350m_8gb"))
CASES: dict[str, tuple[str, ...]] = {
    "vit_l16_8gb": (VIT,),
    "vit_l16_8gb_adamw": (VIT, *ADAMW),
    "vit_l16_8gb_adamw_kept": (VIT, *KEPT),
    "vit_l16_8gb_adamw_autocast": (VIT, *AUTOCAST),
    "vit_l16_8gb_adamw_recomputed": (VIT, *ADAMW, *RECOMPUTED),
    "vit_l16_8gb_adamw_recomputed_kept": (VIT, *ADAMW, *RECOMPUTED[:2], "optim.release_gradients=false"),
    "vit_l16_6gb": (VIT, "budget=6gb"),
    "vit_l16_6gb_adamw": (VIT, "budget=6gb", *ADAMW),
    "vit_l16_8gb_kept": (VIT, "micro_batch=32", "model.checkpointing=false"),
    "vit_l16_8gb_all": (VIT, "model.checkpointing=true", "optim.release_gradients=false"),
    "vit_l16_8gb_some": (VIT, "micro_batch=32", "model.checkpointing=12", "optim.release_gradients=false"),
    "dit_xl2_16gb": (DIT,),
    "dit_xl2_16gb_all": (DIT, "model.checkpointing=true"),
    "dit_xl2_16gb_adamw": (DIT, *ADAMW),
    "dit_xl2_16gb_adamw_kept": (DIT, *KEPT),
    "dit_xl2_16gb_adamw_autocast": (DIT, *AUTOCAST),
    "llama_350m_4gb": (LLAMA, "budget=4gb"),
    "llama_350m_8gb": (LLAMA,),
    "llama_350m_8gb_adamw": (LLAMA, *ADAMW),
    "llama_350m_4gb_adamw8bit": (LLAMA, "budget=4gb", "allocator=uniform_adamw8bit"),
    "llama_1b_16gb": (LLAMA, "model.size=1b", "budget=16gb"),
    "vit_l16_8gb_kept_compiled": (VIT, "micro_batch=32", "model.checkpointing=false", COMPILED),
    "vit_l16_8gb_compiled": (VIT, COMPILED),
    "vit_l16_8gb_compiled_some": (VIT, COMPILED, "micro_batch=128", "model.checkpointing=18"),
    "vit_l16_8gb_auto": (VIT, "model.compile=auto"),
    "dit_xl2_16gb_compiled": (DIT, COMPILED),
    "llama_350m_4gb_compiled": (LLAMA, "budget=4gb", COMPILED),
    **{name: (f"experiments={name}",) for name in LARGE},
}
SEARCHED = ("vit_l16_8gb", "llama_350m_4gb", "dit_xl2_16gb", "llama_350m_8gb", "llama_1b_16gb")
QUIET = (
    "trainer.enable_progress_bar=false", "trainer.limit_val_batches=1", "checkpoint.export=false", "reallocation=off",
    "task.num_samples=0",
)  # fmt: skip
PINS = {
    "micro_batch": "micro_batch", "model.checkpointing": "recomputed", "optim.release_gradients": "release",
    "model.compile": "compiled",
}  # fmt: skip
WAY = ("micro_batch", "recomputed", "num_layers", "release", "compiled")  # of the option that was chosen
TOLD = (
    "case", *WAY, "deciding_s", "training_s", "samples_per_s", "step_ms", "floor_ms", "peak_gib", "predicted_gib",
    "why",
)  # fmt: skip
PRODUCTS = 770e12  # floating-point operations a second, what an H200's largest product reached
GIB = {"peak_gib": "peak_bytes", "predicted_gib": "peak_bytes_predicted"}
MEASURED = (
    "samples_per_s", "step_ms", "step_s_predicted", "peak_bytes", "peak_bytes_predicted", "budget_bytes", "budget_met",
    "state_bytes", "risk_total", "num_steps", "commit",
)  # fmt: skip


def run_case(
    name: str,
    *,
    steps: int,
    warm: int,
    folder: Path,
    run_s: float | None = None,
    stacks: Path | None = None,
    given: Sequence[str] = (),
    compiled: Path | None = None,
    briefly: bool = False,
) -> None:
    """One case in this process, which ends with it; what it says goes to a log in its folder. `run_s`: it is decided
    for a run of so many seconds. `stacks`: where the seconds until its end are told by what they were spent in.
    `given`: more overrides. `compiled`: where compilers keep code. `briefly`: it ends with its first step."""
    if compiled is not None:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(compiled), "TRITON_CACHE_DIR": str(compiled / "triton")}
    import torch

    from baoc.config.compose import compose
    from baoc.config.from_hydra import from_hydra
    from baoc.training import run as training
    from baoc.training import trainer as assembly
    from baoc.training.measure import microbatch_search

    if run_s is not None:
        microbatch_search.run_seconds = lambda *_: run_s
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    began, told = time.perf_counter(), folder / "first_step_s"
    told.unlink(missing_ok=True)

    class FirstStep(assembly.StepMonitor):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            super().on_train_batch_end(trainer, *rest)
            if trainer.global_step and not told.is_file():
                if trainer.strategy.root_device.type == "cuda":
                    torch.cuda.synchronize()
                told.write_text(str(time.perf_counter() - began))
                if briefly:
                    os._exit(0)

    assembly.StepMonitor = partial(FirstStep, warmup_steps=warm)
    build, built = training.build, list[Any]()
    training.build = lambda *args, **kwargs: built.append(build(*args, **kwargs)) or built[-1]
    overrides = [*CASES[name], *given, f"trainer.max_steps={steps}", *(QUIET if "dit" in name else QUIET[:-1])]
    if stacks is not None:
        torch._logging.set_logs(recompiles=True)  # pyright: ignore  # the log says why anything is compiled again
    with sampled(stacks):
        training.run(from_hydra(compose(overrides)), run_dir=folder, command=" ".join(overrides))
    (folder / "flops").write_text(str(forward_flops(*built[-1])))


def forward_flops(task: Any, data: Any) -> int:
    """Of the products in a sample's forward."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from baoc.data.batches import resize_batch
    from baoc.training.measure.probe import silent

    batch = task.transfer_batch_to_device(resize_batch(next(iter(data.val_dataloader())), 1), task.device, 0)
    autocast = torch.autocast(task.device.type, torch.bfloat16)  # some weights may have 16 bits
    with silent(task), torch.no_grad(), autocast, FlopCounterMode(display=False) as counter:
        task.eval().training_step(batch, 0)
    return counter.get_total_flops()


def floor_ms(row: dict[str, Any], *, flops: int) -> float:
    """Milliseconds of a step's products at PRODUCTS: two of backward for each of forward, and those computed again."""
    again = int(row["recomputed"]) / max(1, int(row["num_layers"]))
    return 1e3 * flops * int(row["micro_batch"]) * int(row["accumulation"]) * (3 + again) / PRODUCTS


class Searched(Exception):
    """Every option was tried, and nothing is to be trained."""


def search_case(name: str, *, folder: Path, search_s: float, **given: Any) -> None:
    """The decision of a case, then every option that fits. Leaves search.csv and search.json in the folder."""
    from baoc.training import run as training
    from baoc.training.measure import microbatch_search
    from baoc.types import to_plain

    choose, decide, began = microbatch_search.choose_option, training.decide, time.perf_counter()

    def searched(options: Any, *, objective: str, measurer: Any) -> Any:
        choice = choose(options, objective=objective, measurer=measurer)
        decide_s, end = time.perf_counter() - began, time.monotonic() + search_s
        options = choice.options

        def untried() -> list[Any]:
            return [option for option in options if option.fits and not option.tried and option.samples_per_s > 0]

        while (left := untried()) and time.monotonic() < end:
            options = measurer.measure(replace(max(left, key=lambda option: option.samples_per_s), compared=True))
        write_rows(folder / "search.csv", [to_plain(option) | {"option": option.name} for option in options])
        known = [option for option in options if option.tried and option.fits]
        if known and choice.chosen is not None:
            best = max(known, key=lambda option: option.samples_per_s)
            rate = next(option.samples_per_s for option in known if option.key == choice.chosen.key)
            found = {
                "decide_s": decide_s,
                "measured": choice.num_measured,
                "won": choice.won,
                "left": len(choice.rivals),
                "left_gain": choice.gain,
                "chosen_option": choice.chosen.name,
                "chosen_rate": rate,
                "best_option": best.name,
                "best_rate": best.samples_per_s,
                "below_best": 1 - rate / best.samples_per_s,
                "tried": len(known),
                "untried": len(untried()),
                "untried_promise": max((option.samples_per_s for option in untried()), default=0.0),
            }
            (folder / "search.json").write_text(json.dumps(found))
        return choice

    def decided(*args: Any, **kwargs: Any) -> Any:
        nonlocal began
        began = time.perf_counter()
        decide(*args, **kwargs)
        raise Searched

    microbatch_search.choose_option, training.decide = searched, decided
    with suppress(Searched):
        run_case(name, folder=folder, **given)


def beside(
    name: str, *, row: dict[str, Any], runs: Path, seconds: Callable[[], float], given: dict[str, Any]
) -> list[dict[str, Any]]:
    """What each process of a case spent until its first step had ended; `row` is that of the first, which has ended."""
    if not row.get("option"):
        return []
    ways = ["objective=quality", *(f"{key}={str(row[of]).lower()}" for key, of in PINS.items())]  # nothing is open
    code = {where: runs / f"{name}_{where}" / "code" for where in ("", "cold")}
    told: list[dict[str, Any]] = []
    for kind, overrides in {"first": (), "kept": (), "given": ways, "cold": ways}.items():
        folder = runs / (name if kind == "first" else f"{name}_{kind}")
        compiled = code["cold" if kind == "cold" else ""]
        if kind == "cold":
            shutil.rmtree(compiled, ignore_errors=True)
        run = partial(run_case, name, folder=folder, given=overrides, compiled=compiled, briefly=True, **given)
        why = "" if kind == "first" else forked(run, folder=folder, seconds=seconds())
        deciding = json.loads(read(folder / "deciding.json") or "{}")
        seconds_of = {key: deciding.get(key, 0.0) for key in ("total_s", "training_s")}
        told.append(
            {"case": name, "kind": kind, "option": row["option"], "first_step_s": read(folder / "first_step_s") or ""}
            | seconds_of
            | {"why": why}
            | deciding.get("phases_s", {})
        )
    return told


def forked(run: Callable[[], None], *, folder: Path, seconds: float) -> str:
    """Why `run` did not come to its end; empty where it did."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run()
            status = 0
        except BaseException as error:  # the row tells it
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "error.txt").write_text(f"{type(error).__name__}: {error}")
        finally:
            os._exit(status)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            told = folder / "error.txt"
            return "" if status == 0 else told.read_text().splitlines()[0] if told.is_file() else f"status {status}"
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"cut after {seconds:.0f} s"


def row_of(name: str, *, folder: Path, why: str, took_s: float) -> dict[str, Any]:
    row: dict[str, Any] = {"case": name, "command": " ".join(CASES[name]), "option": "", "weights": ""}
    result = json.loads(read(folder / "result.json") or "{}")
    row |= {key: result.get(key, "") for key in MEASURED}
    row["deciding"] = read(folder / "deciding.json") or ""
    chosen = [option for option in options_of(folder) if option["chosen"] == "True"]
    if chosen:
        row |= {key: chosen[0][key] for key in ("option", "weights", *WAY)}
        seconds = json.loads(read(folder / "deciding.json") or "{}")
        row["deciding_s"] = round(seconds.get("total_s", math.nan), 2)
        row["training_s"] = round(seconds.get("training_s", math.nan), 2)  # of these, for what is trained anyway
    if result:
        row["torch"] = result["versions"].get("torch", "")
        if result["step_ms"] is not None:  # else too few steps to time one
            row["floor_ms"] = floor_ms(chosen[0], flops=int(read(folder / "flops") or 0)) if chosen else ""
            row["step_error"] = 1e3 * result["step_s_predicted"] / result["step_ms"] - 1
        row["peak_error"] = result["peak_bytes_predicted"] / result["peak_bytes"] - 1
        row[result["quality"]["name"]] = result["quality"]["value"]
    return row | {"took_s": round(took_s, 1), "why": why}


def options_of(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((read(folder / "options.csv") or "").splitlines()))


def read(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("/tmp/budget_ratio"))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm", type=int, default=5, help="first steps that are not timed: steps of seconds need few")
    parser.add_argument("--seconds", type=float, default=230.0, help="of all cases; those after are left out")
    parser.add_argument("--search", type=float, default=0.0, metavar="S")
    parser.add_argument("--run-seconds", type=float, metavar="S", help="decide as for runs that last so long")
    parser.add_argument("--case-seconds", type=float, default=120.0, help="of one case")
    parser.add_argument("--only", nargs="*", choices=list(CASES))
    parser.add_argument("--first", action="store_true", help="decide anew, as if nothing was kept")
    parser.add_argument("--beside", action="store_true", help="what deciding takes beyond the same run without it")
    parser.add_argument(
        "--stacks", nargs="*", metavar="NAME", help="leave what the seconds of these, or all, were spent in"
    )
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.only is None:
        asked.only = list(SEARCHED if asked.search else CASES)
    end = time.monotonic() + asked.seconds
    import transformers.models.llama.modeling_llama
    import transformers.models.vit.modeling_vit  # noqa: F401

    import baoc.models.dit
    import baoc.sweep.preload
    import baoc.tasks.diffusion
    import baoc.tasks.language
    import baoc.tasks.vision  # noqa: F401

    if asked.search or asked.first or asked.beside:
        from baoc.cache import cache_folder

        for kept in cache_folder().glob("decision-*.json"):
            kept.unlink()
    print(f"imports took {asked.seconds - (end - time.monotonic()):.1f} s", flush=True)
    rows: list[dict[str, Any]] = []
    options: list[dict[str, Any]] = []
    searched: list[dict[str, Any]] = []
    deciding: list[dict[str, Any]] = []
    for name in asked.only:
        began = time.monotonic()
        if end - began < 15:
            print(f"no time for {name}")
            continue
        folder = asked.runs / name
        given = {"steps": asked.steps, "warm": asked.warm, "run_s": asked.run_seconds}
        looked = asked.stacks is not None and name in (asked.stacks or asked.only)  # takes some percents of the seconds
        stacks = {key: asked.out / f"{key}.stacks.txt" if looked else None for key in (name, f"{name}_search")}
        search, why = {}, ""
        if asked.search:
            first = asked.runs / f"{name}_search"
            run = partial(
                search_case, name, folder=first, search_s=asked.search, stacks=stacks[f"{name}_search"], **given
            )
            why = forked(run, folder=first, seconds=min(end - began, asked.case_seconds))
            search = json.loads(read(first / "search.json") or "{}")
            search["first_deciding"] = read(first / "deciding.json") or ""
            rows_of_search = list(csv.DictReader((read(first / "search.csv") or "").splitlines()))
            searched += [{"case": name, **option} for option in rows_of_search]
            write_rows(asked.out / "search.csv", searched)
        code = asked.runs / f"{name}_" / "code" if asked.beside else None
        if code is not None:
            shutil.rmtree(code, ignore_errors=True)
        run = partial(run_case, name, folder=folder, stacks=stacks[name], compiled=code, **given)
        why = forked(run, folder=folder, seconds=min(end - time.monotonic(), asked.case_seconds)) or why
        rows.append(row_of(name, folder=folder, why=why, took_s=time.monotonic() - began) | search)
        options += [{"case": name, **option} for option in options_of(folder)]
        write_rows(asked.out / "ratio.csv", rows)
        write_rows(asked.out / "options.csv", options)
        if asked.beside:
            deciding += beside(name, row=rows[-1], runs=asked.runs, seconds=lambda: end - time.monotonic(), given=given)
            write_rows(asked.out / "deciding.csv", deciding)
        shown = {key: f"{value:.5g}" if isinstance(value, float) else value for key, value in rows[-1].items()}
        keys = ("case", "option", "weights", "samples_per_s", "peak_bytes", "peak_error", "step_ms", "step_error")
        more = (
            "decide_s", "chosen_rate", "best_option", "best_rate", "below_best", "tried", "untried", "first_deciding",
            "deciding",
        )  # fmt: skip
        print(
            " | ".join(str(shown.get(k, "-")) for k in (*keys, *(more if search else ()), "took_s", "why")), flush=True
        )
    for told in deciding:
        parts = [f"{key} {value:.2f}" for key, value in told.items() if isinstance(value, float) and value >= 0.1]
        print(
            " | ".join(
                [told["case"], told["kind"], f"first step after {told['first_step_s'][:5]} s", *parts, told["why"]]
            )
        )
    print(" | ".join(TOLD))
    for row in rows:
        gib = {key: f"{row[of] / 2**30:.2f}" for key, of in GIB.items() if isinstance(row.get(of), int)}
        print(" | ".join(str(told) for told in (gib.get(key, row.get(key, "-")) for key in TOLD)))


if __name__ == "__main__":
    main()
