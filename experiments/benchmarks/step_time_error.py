"""Predicted against measured seconds of a step, and bytes of the peak: planning and a short run of each case.

`python experiments/benchmarks/step_time_error.py OUT.csv [--steps 20] [--only NAME...]`, on whatever device is there.
Each case is a run in this process; one that fails is a row with its reason. Seconds of a busy machine are no measure.
"""

import argparse
import csv
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc import train as training  # noqa: E402
from baoc.config.compose import compose  # noqa: E402
from baoc.config.environment import commit  # noqa: E402
from baoc.config.from_hydra import from_hydra  # noqa: E402
from baoc.errors import BaocError  # noqa: E402

QUIET = (
    "trainer.enable_progress_bar=false",
    "trainer.limit_val_batches=1",
    "checkpoint.export=false",
    "reallocation=off",
)
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
}


def measured(name: str, overrides: tuple[str, ...], *, steps: int) -> dict[str, object]:
    """One case as a row; `error` is predicted over measured, less 1."""
    row: dict[str, object] = {"case": name, "commit": commit(), "torch": torch.__version__, "why": ""}
    row["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    began = time.time()
    try:
        config = from_hydra(compose([*overrides, f"trainer.max_steps={steps}", *QUIET]))
        with tempfile.TemporaryDirectory() as folder:
            result = training.run(config, run_dir=Path(folder), command=" ".join(overrides))
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
    }


def main() -> None:
    cases = ON_CUDA if torch.cuda.is_available() else ON_CPU
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", nargs="*", choices=sorted(cases), default=sorted(cases))
    asked = parser.parse_args()
    rows: list[dict[str, object]] = []
    for name in asked.only:
        rows.append(measured(name, cases[name], steps=asked.steps))
        columns = list(dict.fromkeys(key for row in rows for key in row))
        with asked.out.open("w", newline="") as file:  # again after each case: a machine may be taken away
            writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    for row in rows:
        shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()}
        print(" ".join(str(shown.get(key, "-")) for key in ("case", "step_s", "step_error", "peak_error", "why")))


if __name__ == "__main__":
    main()
