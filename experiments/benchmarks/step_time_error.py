"""Predicted against measured seconds of a step, and bytes of the peak: planning and a short run of each case.

    python experiments/benchmarks/step_time_error.py OUT.csv  # time not recorded, any device -> OUT.csv

Each case is a run in this process; one that fails is a row with its reason. Seconds of a busy machine are no
measure. The columns after `seconds` say where a step goes, per step, medians in milliseconds: of the steps that were
trained, of those rehearsed before, and with --after of the same rehearsal when training has ended, which is then in the
peak. `host_*` until the call returned, `busy_*` the processor's in all threads, `device_*` between events;
`optimizer_step` contains the last micro-batch. `host_from_step_to_step` is all there is, with the loader and what else
lies between two steps, which neither number counts. `deciding`: where the seconds of the decision went.
"""

import argparse
import json
import sys
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc.config.compose import compose
from baoc.config.environment import commit
from baoc.config.from_hydra import from_hydra
from baoc.errors import BaocError
from baoc.optim import BlockwiseOptimizer
from baoc.training import run as training
from baoc.training.lightning import BaocStrategy
from baoc.training.measure import microbatch_search as decision
from baoc.training.measure import microbatches as trials
from baoc.training.measure import probe
from baoc.training.measure.probe import silent
from experiments.benchmarks.shared import read_rows, write_rows

QUIET = (
    "trainer.enable_progress_bar=false", "trainer.limit_val_batches=1", "checkpoint.export=false", "reallocation=off",
)  # fmt: skip
ON_CPU = {
    "vit_tiny": ("model=vit", "model.size=tiny"),
    "vit_tiny_auto": ("model=vit", "model.size=tiny", "micro_batch=auto", "objective=throughput"),
    "vit_tiny_int8": ("model=vit", "model.size=tiny", "allocator=uniform_adamw8bit"),
    "llama_nano": ("model=llama", "model.size=nano"),
    "llama_nano_limited": ("model=llama", "model.size=nano", "budget.step_time=1.5"),
    "dit_tiny": ("model=dit", "model.size=tiny", "task.num_samples=0"),
}
SMALL_LLAMA = ("model=llama", "model.size=130m", "model.vocab_size=32000", "dataset.sequence_length=512")
ON_CUDA = {
    "llama_130m_adamw": (*SMALL_LLAMA, "batch_size=4", "micro_batch=4", "allocator=uniform_adamw"),
    "llama_130m_limited": (*SMALL_LLAMA, "batch_size=4", "micro_batch=4", "budget=state_25", "budget.step_time=1.1"),
    "vit_l16_8gb": ("experiments=vit_l16_8gb",),
    "vit_l16_8gb_adamw": ("experiments=vit_l16_8gb", "allocator=uniform_adamw", "catalogue=default"),
    "vit_l16_8gb_limited": ("experiments=vit_l16_8gb", "budget.step_time=1.05"),
    "vit_b16_4gb": ("experiments=vit_b16_4gb",),
    "llama_350m_8gb": ("experiments=llama_350m_8gb",),
    "dit_b2_8gb": ("experiments=dit_b2_8gb", "task.num_samples=0"),
    "dit_xl2_16gb": ("experiments=dit_xl2_16gb", "task.num_samples=0"),
    "vit_l16_8gb_kept": (
        "experiments=vit_l16_8gb",
        "allocator=uniform_adamw",
        "model.checkpointing=false",
        "model.activations=null",
    ),
    "llama_350m_4gb": ("experiments=llama_350m_8gb", "budget=4gb"),
}


class Parts:
    """Milliseconds of each part of the steps of a run, by wrapping what Lightning calls; entered around it.

    Steps of the run's own Trainer are `trained`, those of a rehearsal before it `rehearsed`, and those of the same
    rehearsal once more when training has ended `after`: where these differ, it is the machine that changed.
    """

    def __init__(self, *, after: bool = False) -> None:
        self._after = after
        self._before: list[tuple[Any, str, Any]] = []
        self._spans: list[tuple[str, float, float, float, Any, Any]] = []
        self._steps: dict[str, list[list[tuple[str, float, float, float, Any, Any]]]] = {}
        self._inside: set[str] = set()
        self._phase = "trained"
        self._again: Any = None  # the newest rehearsal
        self.decide_s = 0.0
        self.rehearsed_s: dict[str, float] = {}

    def __enter__(self) -> "Parts":
        for owner, name in (
            (Strategy, "training_step"),
            (Strategy, "backward"),
            (Strategy, "optimizer_step"),
            (BlockwiseOptimizer, "mask_nonfinite"),
            (torch.optim.Optimizer, "zero_grad"),
        ):
            self._wrap(owner, name, ends=name == "optimizer_step")
        self._put(training, "decide", self._decide)
        for module in (probe, trials):
            self._put(module, "rehearse", partial(self._rehearse, module.rehearse))
        self._put(BaocStrategy, "teardown", self._teardown(BaocStrategy.teardown))
        return self

    def __exit__(self, *exc: object) -> None:
        for owner, name, original in reversed(self._before):
            setattr(owner, name, original)

    def _put(self, owner: Any, name: str, made: Any) -> None:
        self._before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, made)

    def _decide(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return decision.decide(*args, **kwargs)
        finally:
            self.decide_s = time.perf_counter() - began

    def _rehearse(self, rehearse: Any, *args: Any, **kwargs: Any) -> float:
        self._again = partial(self._rehearse, rehearse, *args, **kwargs)
        before, self._phase = self._phase, "after" if self._phase == "after" else "rehearsed"
        self._steps[self._phase], self._spans = [], []
        try:
            found = self.rehearsed_s[self._phase] = rehearse(*args, **kwargs)
        finally:
            self._phase, self._spans = before, []
        return found

    def _teardown(self, teardown: Any) -> Any:
        def done(strategy: BaocStrategy) -> None:
            module = strategy.lightning_module
            if self._after and self._again is not None and module is not None and self._steps.get("trained"):
                again, self._again, self._phase = self._again, None, "after"
                releaser = strategy.reallocator.optimizer.releaser if strategy.reallocator is not None else None
                with silent(module), releaser.held() if releaser is not None else nullcontext():
                    again()
            teardown(strategy)

        return done

    def _wrap(self, owner: type, name: str, *, ends: bool) -> None:
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if name in self._inside:  # a rehearsal's strategy calls the run's
                return original(*args, **kwargs)
            self._inside.add(name)
            start, busy, event = time.perf_counter(), time.process_time(), self._event()
            try:
                out = original(*args, **kwargs)
            finally:
                self._inside.remove(name)
            end, busy = time.perf_counter(), time.process_time() - busy
            self._spans.append((name, start, end, busy, event, self._event()))
            if ends:
                self._steps.setdefault(self._phase, []).append(self._spans)
                self._spans = []
            return out

        self._put(owner, name, timed)

    def _event(self) -> Any:
        if not torch.cuda.is_available():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def row(self) -> dict[str, float]:
        return {
            f"{phase}_{name}": value
            for phase, skip in (("rehearsed", 2), ("trained", 5), ("after", 2))
            for name, value in self._medians(self._steps.get(phase, [])[skip:]).items()
        }

    def _medians(self, steps: list[list[tuple[str, float, float, float, Any, Any]]]) -> dict[str, float]:
        found: dict[str, list[float]] = {}
        for before, spans in pairwise(steps):
            sums: dict[str, float] = {}
            for name, start, end, busy, *events in spans:
                sums[f"host_{name}"] = sums.get(f"host_{name}", 0.0) + (end - start) * 1e3
                sums[f"busy_{name}"] = sums.get(f"busy_{name}", 0.0) + busy * 1e3
                if events[0] is not None:
                    sums[f"device_{name}"] = sums.get(f"device_{name}", 0.0) + events[0].elapsed_time(events[1])
            sums["host_from_step_to_step"] = (spans[-1][2] - before[-1][2]) * 1e3
            for name, value in sums.items():
                found.setdefault(name, []).append(value)
        row = {name: median(values) for name, values in found.items()}
        if len(steps) > 2:
            low, _, high = quantiles(found["host_optimizer_step"], n=4)
            row |= {"steps": len(steps), "host_optimizer_step_quarter": low, "host_optimizer_step_three_quarters": high}
        return row


def measured(name: str, overrides: tuple[str, ...], *, steps: int, after: bool = False) -> dict[str, object]:
    """One case as a row; `error` is predicted over measured, less 1."""
    row: dict[str, object] = {"case": name, "commit": commit(), "torch": torch.__version__, "why": ""}
    row["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    began = time.time()
    try:
        config = from_hydra(compose([*overrides, f"trainer.max_steps={steps}", *QUIET]))
        with tempfile.TemporaryDirectory() as folder, Parts(after=after) as parts:
            result = training.run(config, run_dir=Path(folder), command=" ".join(overrides))
            row |= known(Path(folder)) | {"decide_s": round(parts.decide_s, 1)}
    except BaocError as error:
        return row | {"why": str(error).splitlines()[0], "seconds": round(time.time() - began, 1)}
    assert result is not None
    step_s = result.step_ms / 1e3
    return row | {
        "step_s": step_s,
        "step_s_predicted": result.step_s_predicted,
        "step_error": result.step_s_predicted / step_s - 1,
        "peak_bytes": result.peak_bytes,
        "peak_bytes_predicted": result.peak_bytes_predicted,
        "peak_error": result.peak_bytes_predicted / result.peak_bytes - 1,
        "samples_per_s": result.samples_per_s,
        "seconds": round(time.time() - began, 1),
        **parts.row(),
    }


def known(run_dir: Path) -> dict[str, object]:
    """What was decided, and the predicted seconds but for the optimizer's part."""
    found: dict[str, object] = {}
    if (run_dir / "options.csv").is_file():
        chosen = [row for row in read_rows(run_dir / "options.csv") if row["chosen"] == "True"]
        found["option"] = chosen[0]["option"] if chosen else ""
    if (run_dir / "deciding.json").is_file():
        found["deciding"] = json.loads((run_dir / "deciding.json").read_text())["phases_s"]
    if (run_dir / "latency.json").is_file():
        found["rest_s_predicted"] = json.loads((run_dir / "latency.json").read_text())["base_step_s"]
    return found


def main() -> None:
    cases, here = ON_CPU | ON_CUDA, ON_CUDA if torch.cuda.is_available() else ON_CPU
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--after", action="store_true")
    parser.add_argument("--only", nargs="*", choices=sorted(cases), default=sorted(here))
    asked = parser.parse_args()
    rows: list[dict[str, object]] = []
    for name in asked.only:
        rows.append(measured(name, cases[name], steps=asked.steps, after=asked.after))
        print(told(rows[-1], wide=True), flush=True)
        write_rows(asked.out, rows)  # again after each case: a machine may be taken away
    for row in rows:
        print(told(row))


def told(row: dict[str, object], *, wide: bool = False) -> str:
    shown = {key: f"{value:.4g}" if isinstance(value, float) else str(value) for key, value in row.items()}
    if wide:
        return " ".join(f"{key}={value}" for key, value in shown.items() if key not in ("commit", "torch", "device"))
    return " ".join(shown.get(key, "-") for key in ("case", "step_s", "step_error", "peak_error", "why"))


if __name__ == "__main__":
    main()
