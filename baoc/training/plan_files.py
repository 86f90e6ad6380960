"""Writes plans and decisions into the run folder, one file per value (docs/runs.md).

Files hold the newest plan; reallocations.jsonl has every decision.
"""

import csv
import json
import math
from pathlib import Path

from baoc.planning.candidates import candidate_rows
from baoc.planning.planner import Planner
from baoc.tracking import console, files
from baoc.tracking.metrics import supersede
from baoc.types import Plan, Profile, Reallocation, RunResult, to_plain


class Recorder:
    """Writes into `run_dir`; its methods are the strategy's listeners."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.planner: Planner | None = None
        self._peaks: list[int] = []
        self.step_s_predicted = math.nan  # of a whole step of the plan in force

    @property
    def peak_bytes_predicted(self) -> int:
        """The largest peak that any plan of the run predicted."""
        return max(self._peaks, default=0)

    def planned(self, planner: Planner, plan: Plan) -> None:
        """Writes blocks, footprint, latency, candidates and allocation of the first plan, and prints it."""
        self.planner, self._peaks = planner, []  # of this fit
        files.write_json(self.run_dir / "blocks.json", plan.blocks)
        if planner.footprint is not None:
            files.write_json(self.run_dir / "footprint.json", planner.footprint)
        if planner.latency is not None:
            files.write_json(self.run_dir / "latency.json", planner.latency)
        self._write_plan(plan, profile=None, step=0)
        by = plan.basis.by if plan.basis is not None else plan.risk_model
        names = {"measured": "measurements", "prior": "priors by role", "recipe": "the recipe", "race": "the recipe"}
        console.print_plan(plan, title=f"Allocation at the start, from {names.get(by, by)}")
        if planner.device_is_host and plan.host_bytes:
            console.say(
                "the device is the CPU, whose memory is the host's: placement there saves nothing, and runs as "
                "it would on a GPU"
            )

    def resumed(self, step: int, plan: Plan) -> None:
        """After a resume at `step`: marks decisions of an attempt that went further as superseded; of `step` itself
        changes of the budget and conversions while loading, which the checkpoint lacks."""
        self._peaks = [plan.peak_bytes]
        supersede(
            self.run_dir / files.REALLOCATIONS_FILE,
            from_step=step + 1,
            also=lambda event: event["step"] == step and event["trigger"] in ("budget", "resume"),
        )

    def reallocated(self, event: Reallocation, plan: Plan, profile: Profile | None) -> None:
        """Writes a decision to reallocations.jsonl and the newest plan to the other files, and prints what is new."""
        files.append_jsonl(self.run_dir / files.REALLOCATIONS_FILE, event)
        if profile is not None:
            files.write_json(self.run_dir / "profile.json", profile)
        self._write_plan(plan, profile=profile, step=event.step)
        console.print_reallocation(event)
        if event.accepted:
            console.print_plan(plan, title=f"Allocation from step {event.step} on, by {plan.risk_model} risk")

    def concluded(self, result: RunResult) -> None:
        """Adds measured values to footprint.json, and to the row of options.csv that was run."""
        measured = {"peak_bytes": result.peak_bytes, "step_s": result.step_ms / 1e3}
        predicted = {"peak_bytes": result.peak_bytes_predicted, "step_s": result.step_s_predicted}
        errors = {key: predicted[key] / value - 1 if value else math.nan for key, value in measured.items()}
        path = self.run_dir / "footprint.json"
        if path.is_file():
            footprint = json.loads(path.read_text(encoding="utf-8"))
            files.write_json(path, {**footprint, "measured": measured, "predicted": predicted, "error": errors})
        path = self.run_dir / "options.csv"
        if path.is_file():
            with path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
            for row in rows:
                chosen = row["chosen"] == "True"
                row |= {f"{key}_measured": str(value) if chosen else "" for key, value in measured.items()}
            files.write_csv(path, rows)

    def _write_plan(self, plan: Plan, *, profile: Profile | None, step: int) -> None:
        assert self.planner is not None
        self._peaks.append(plan.peak_bytes)
        self.step_s_predicted = self.planner.step_seconds(plan.allocation.choices)
        candidates = self.planner.candidates(risk=plan.risk_model, profile=profile)
        files.write_csv(self.run_dir / "candidates.csv", candidate_rows(candidates))
        files.write_json(
            self.run_dir / "allocation.json",
            {
                "step": step,
                "risk_model": plan.risk_model,
                "basis": plan.basis,
                "binding": plan.binding,
                "limits": plan.limits,
                "least_feasible_bytes": plan.least_feasible_bytes,
                "most_useful_bytes": plan.most_useful_bytes,
                "peak_bytes_predicted": plan.peak_bytes,
                "staging_bytes": plan.staging_bytes,
                **to_plain(plan.allocation),
                "pinned_bytes": plan.host_bytes,
                "reasons": plan.reasons,
            },
        )
