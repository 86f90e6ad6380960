"""What a budget buys: samples per second of BAOC and of fp32 AdamW in the same memory, and Llama 350M in 4 GiB.

`python experiments/benchmarks/budget_ratio.py OUT [--steps 8] [--only NAME...] [--seconds 230]`, on an NVIDIA GPU.
Leaves OUT/ratio.csv with a row per case, written when it ends, and OUT/options.csv with every option of every decision.
A case is a run of an experiment in a process of its own, under the cap of its budget, forked from one that has imported
what runs need. fp32 AdamW stands beside it three times: with every option that the experiment has and its own best one
(`*_adamw`), the same with all activations kept (`*_adamw_kept`), and kept as autocast makes them (`*_adamw_autocast`).
`*_recomputed` and `*_kept` pin what is to be compared, and take fewer seconds to decide.
"""

import argparse
import csv
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

ADAMW = ("allocator=uniform_adamw",)
KEPT = (*ADAMW, "model.checkpointing=false")
AUTOCAST = (*KEPT, "model.activations=null")
RECOMPUTED = ("micro_batch=128", "model.checkpointing=true", "optim.release_gradients=true")
COMPILED = "model.compile=true"
VIT, DIT, LLAMA = (f"experiments={name}" for name in ("vit_l16_8gb", "dit_xl2_16gb", "llama_350m_8gb"))
CASES: dict[str, tuple[str, ...]] = {
    "vit_l16_8gb": (VIT,),
    "vit_l16_8gb_adamw": (VIT, *ADAMW),
    "vit_l16_8gb_adamw_kept": (VIT, *KEPT),
    "vit_l16_8gb_adamw_autocast": (VIT, *AUTOCAST),
    "vit_l16_8gb_adamw_recomputed": (VIT, *ADAMW, *RECOMPUTED),
    "vit_l16_6gb": (VIT, "budget=6gb"),
    "vit_l16_6gb_adamw": (VIT, "budget=6gb", *ADAMW),
    "vit_l16_8gb_kept": (VIT, "micro_batch=32", "model.checkpointing=false"),
    "dit_xl2_16gb": (DIT,),
    "dit_xl2_16gb_adamw": (DIT, *ADAMW),
    "dit_xl2_16gb_adamw_kept": (DIT, *KEPT),
    "dit_xl2_16gb_adamw_autocast": (DIT, *AUTOCAST),
    "llama_350m_4gb": (LLAMA, "budget=4gb"),
    "llama_350m_8gb": (LLAMA,),
    "llama_350m_8gb_adamw": (LLAMA, *ADAMW),
    "llama_350m_4gb_adamw8bit": (LLAMA, "budget=4gb", "allocator=uniform_adamw8bit"),
    "vit_l16_8gb_kept_compiled": (VIT, "micro_batch=32", "model.checkpointing=false", COMPILED),
    "vit_l16_8gb_adamw_recomputed_compiled": (VIT, *ADAMW, *RECOMPUTED, COMPILED),
}
QUIET = (
    "trainer.enable_progress_bar=false",
    "trainer.limit_val_batches=1",
    "checkpoint.export=false",
    "reallocation=off",
    "task.num_samples=0",
)
MEASURED = (
    "samples_per_s",
    "step_ms",
    "step_s_predicted",
    "peak_bytes",
    "peak_bytes_predicted",
    "budget_bytes",
    "budget_met",
    "state_bytes",
    "risk_total",
    "num_steps",
    "commit",
)


def run_case(name: str, *, steps: int, warm: int, folder: Path) -> None:
    """One case in this process, which ends with it; what it says goes to a log in its folder."""
    from baoc.config.compose import compose
    from baoc.config.from_hydra import from_hydra
    from baoc.training import run as training
    from baoc.training import trainer as assembly

    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    assembly.StepMonitor = partial(assembly.StepMonitor, warmup_steps=warm)
    overrides = [*CASES[name], f"trainer.max_steps={steps}", *(QUIET if "dit" in name else QUIET[:-1])]
    training.run(from_hydra(compose(overrides)), run_dir=folder, command=" ".join(overrides))


def forked(name: str, *, steps: int, warm: int, folder: Path, seconds: float) -> str:
    """Why the case has no result; empty where it has one."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run_case(name, steps=steps, warm=warm, folder=folder)
            status = 0
        except BaseException as error:  # the row tells it
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


def row_of(name: str, *, folder: Path, why: str, took_s: float) -> dict[str, object]:
    row: dict[str, object] = {"case": name, "command": " ".join(CASES[name]), "option": "", "weights": ""}
    result = json.loads(read(folder / "result.json") or "{}")
    row |= {key: result.get(key, "") for key in MEASURED}
    row["deciding"] = read(folder / "deciding.json") or ""
    chosen = [option for option in options_of(folder) if option["chosen"] == "True"]
    if chosen:
        row |= {key: chosen[0][key] for key in ("option", "weights")}
    if result:
        row["torch"] = result["versions"].get("torch", "")
        if result["step_ms"] is not None:  # else too few steps to time one
            row["step_error"] = 1e3 * result["step_s_predicted"] / result["step_ms"] - 1
        row["peak_error"] = result["peak_bytes_predicted"] / result["peak_bytes"] - 1
        row[result["quality"]["name"]] = result["quality"]["value"]
    return row | {"took_s": round(took_s, 1), "why": why}


def options_of(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((read(folder / "options.csv") or "").splitlines()))


def read(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


def write(path: Path, rows: list[dict[str, object]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("/tmp/budget_ratio"))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm", type=int, default=5, help="first steps that are not timed: steps of seconds need few")
    parser.add_argument("--seconds", type=float, default=230.0, help="of all cases; those after are left out")
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    asked = parser.parse_args()
    end = time.monotonic() + asked.seconds
    import transformers.models.llama.modeling_llama
    import transformers.models.vit.modeling_vit  # noqa: F401

    import baoc.models.dit
    import baoc.sweep.preload
    import baoc.tasks.diffusion
    import baoc.tasks.language
    import baoc.tasks.vision  # noqa: F401

    print(f"imports took {asked.seconds - (end - time.monotonic()):.1f} s", flush=True)
    rows: list[dict[str, object]] = []
    options: list[dict[str, object]] = []
    for name in asked.only:
        began = time.monotonic()
        if end - began < 15:
            print(f"no time for {name}")
            continue
        folder = asked.runs / name
        why = forked(name, steps=asked.steps, warm=asked.warm, folder=folder, seconds=min(end - began, 120))
        rows.append(row_of(name, folder=folder, why=why, took_s=time.monotonic() - began))
        options += [{"case": name, **option} for option in options_of(folder)]
        write(asked.out / "ratio.csv", rows)
        write(asked.out / "options.csv", options)
        shown = {key: f"{value:.5g}" if isinstance(value, float) else value for key, value in rows[-1].items()}
        keys = ("case", "option", "weights", "samples_per_s", "peak_bytes", "peak_error", "step_ms", "step_error")
        print(" | ".join(str(shown.get(key, "-")) for key in (*keys, "took_s", "why")), flush=True)


if __name__ == "__main__":
    main()
