"""Resuming a run: finds and checks the checkpoint, and restores its decision (`decision.json`)."""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from baoc.callbacks.checkpoint import check_contents
from baoc.callbacks.sources import changed_sources
from baoc.config.options import GROUPS, flatten_options
from baoc.config.schema import RunConfig
from baoc.core.compared import COMPARED, SAME
from baoc.errors import BadInputError, CheckpointError
from baoc.frontier.runs import RESULT
from baoc.tracking import console, files
from baoc.tracking.checkpoints import META_KEY, load_checked, resolve_resume
from baoc.tracking.metrics import METRICS_FILE
from baoc.types import LatencyTable, Option, read_plain, to_plain

log = logging.getLogger(__name__)
DECISION = "decision.json"
LATENCY = "latency.json"
FRONTIER = "frontier.csv"  # a run writes it last


def find_checkpoint(config: RunConfig, *, run_dir: Path) -> Path | None:
    """The checkpoint that `resume` names, which is said; see `locate_checkpoint`."""
    checkpoint = locate_checkpoint(config, run_dir=run_dir)
    if config.resume is not None:
        console.say(
            f"resuming from {checkpoint}" if checkpoint else "resume=auto found nothing to resume: starting anew"
        )
    return checkpoint


def locate_checkpoint(config: RunConfig, *, run_dir: Path) -> Path | None:
    """The checkpoint that `resume` names. `auto` searches this run's folder, then its siblings and those of other days.
    If the run has trained in this folder before, as a requeued job has, only this folder is searched: a sibling may be
    another point of a sweep, or have ended. Without an intact checkpoint the run starts anew."""
    if config.resume is None:
        return None
    above = run_dir.resolve().parents
    runs_dir = next((folder for folder in above[1::-1] if folder != Path(folder.anchor)), run_dir)
    match, steps = {"name": config.name, "seed": config.seed}, [0]  # steps: of the checkpoints read, the found one last

    def check(content: Mapping[str, Any]) -> None:
        check_contents(content)
        steps.append(content["global_step"])

    checkpoint = resolve_resume("auto", run_root=run_dir, match=match, check=check) if config.resume == "auto" else None
    if config.resume != "auto" or (checkpoint is None and not (run_dir / METRICS_FILE).is_file()):
        checkpoint = resolve_resume(config.resume, run_root=runs_dir, match=match, check=check)
    if checkpoint is None and config.mode == "eval":
        raise CheckpointError(
            f"resume=auto found no intact checkpoint of name={config.name}, seed={config.seed} under "
            f"{runs_dir}: train first, or give resume=PATH"
        )
    if checkpoint is not None and config.mode != "eval":
        _refuse_finished(checkpoint, step=steps[-1], end=config.trainer.max_steps, run_dir=run_dir)
    return checkpoint


def _refuse_finished(checkpoint: Path, *, step: int, end: int, run_dir: Path) -> None:
    """Refuses to resume a finished run of `end` steps, but not one of this folder that lacks its result."""
    has_ended = all((run_dir / name).is_file() for name in (RESULT, FRONTIER))
    if 0 < end == step and run_dir.resolve() in checkpoint.resolve().parents and not has_ended:
        console.say(f"all {end} steps are done: only the result is still to be made")
    elif 0 < end <= step:
        raise BadInputError(
            f"{checkpoint} is of step {step} and trainer.max_steps={end}: nothing is left to train. Give a larger "
            "trainer.max_steps, or mode=eval to evaluate it"
        )


def tell_changes(config: RunConfig, *, checkpoint: Path, sources: Mapping[str, str]) -> None:
    """Says which settings of the training and which of `sources` have changed since the checkpoint was written; loading
    the optimizer says what stays the checkpoint's."""
    content = load_checked(checkpoint)
    for sentence in changed_sources(content, now=sources):
        console.say(sentence)
    now = training_settings(config)
    then = content.get(META_KEY, {}).get("settings", now)  # earlier versions wrote none, or micro_batch
    keys = [key for key in {**now, **then} if key != "micro_batch" and (key in then or key != "accumulation")]
    changes = [
        f"{key} {_text(before)} -> {_text(after)}"
        for key in keys
        if (before := _compared(key, then.get(key))) != (after := _compared(key, now.get(key)))
    ]
    if changes:
        log.warning("the training goes on with other settings than the checkpoint's: %s", "; ".join(changes))


def training_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that change the training, by key; a checkpoint keeps them as `settings`."""
    plain = to_plain(config) | {group: flatten_options(getattr(config, group)) for group in GROUPS}
    settings: dict[str, Any] = {}
    for name, value in (plain | {"accumulation": config.accumulation}).items():
        row = COMPARED.get(name)
        if row is None or row.resume is None:
            continue
        if not isinstance(value, Mapping):
            settings[name] = value
            continue
        keys = (key for key in value if key in (row.resume or value) and key not in row.not_resume)
        settings |= {f"{name}.{key}": value[key] for key in keys}
    return settings


def _compared(key: str, value: Any) -> Any:
    return SAME[key].get(value, value) if key in SAME else value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# -- decisions --------------------------------------------------------------------------------------------------


def decision_of(source: Option | RunConfig) -> dict[str, Any]:
    """The content of decision.json for an option, or for a configuration without open values."""
    if isinstance(source, Option):
        some = 0 < source.recomputed < source.num_layers
        return {
            "micro_batch": source.micro_batch,
            "checkpointing": source.recomputed if some else bool(source.recomputed),
            "num_layers": source.num_layers,
            "release": source.release,
            "compile": source.compiled,
        }
    return {
        "micro_batch": source.micro_batch_size,
        "checkpointing": source.model.checkpointing or False,
        "release": bool(source.optim.release_gradients),
        "compile": source.model.compile is True,
    }


def saved_decision(config: RunConfig, *, checkpoint: Path | None) -> dict[str, Any]:
    """The decision of a checkpoint's run, which a resumed run keeps. Empty if there is none, or if `config` asks for
    another value or batch, which a message says. Raises BadInputError if the file is damaged."""
    if checkpoint is None:
        return {}
    path = checkpoint.parent.parent / DECISION
    decision: dict[str, Any] = files.read_json(path) if path.is_file() else {}
    if path.is_file() and not _is_decision(decision):
        raise BadInputError(
            f"{path} is no decision of a run ({decision}): it was damaged; remove it to have it decided anew"
        )
    if clauses := conflicts(decision, config=config):
        console.say(f"the resumed run had decided {'; '.join(clauses)}: it is decided anew")
        return {}
    return decision


def _is_decision(content: object) -> bool:
    return (
        isinstance(content, Mapping)
        and type(content.get("micro_batch")) is int
        and content["micro_batch"] > 0
        and (type(recomputes := content.get("checkpointing")) is bool or (type(recomputes) is int and recomputes > 0))
        and type(content.get("num_layers", 0)) is int
        and type(content.get("release", False)) is bool
        and type(content.get("compile", False)) is bool
    )


def conflicts(decision: Mapping[str, Any], *, config: RunConfig) -> list[str]:
    """Values of a decision that contradict `config`, as clauses of a message."""
    asked = {
        "micro_batch": config.micro_batch if isinstance(config.micro_batch, int) else None,
        "checkpointing": None if config.model.checkpointing == "auto" else config.model.checkpointing,
        "release": config.optim.release_gradients,
        "compile": None if config.model.compile == "auto" else config.model.compile,
    }

    def numbered(value: Any) -> Any:
        """`checkpointing=true` is the same as the number of all layers, which earlier decisions lack."""
        return (decision.get("num_layers") or math.inf) if value is True else value

    clauses = [
        f"{key}={decision[key]}, and {key}={value} is asked for now"
        for key, value in asked.items()
        if value is not None and numbered(decision.get(key, value)) != numbered(value)
    ]
    size = decision.get("micro_batch", 1)
    devices = config.trainer.devices
    if not clauses and config.batch_size % (size * devices):
        on_each = f" on each of {devices} devices" if devices > 1 else ""
        clauses.append(f"micro_batch={size}{on_each}, which does not divide batch_size={config.batch_size}")
    if not clauses and decision.get("release") and size * devices != config.batch_size:
        clauses.append(
            f"released gradients of {size} samples at once, and batch_size={config.batch_size} is asked for now"
        )
    return clauses


def write_decision(decision: Mapping[str, Any], *, run_dir: Path) -> None:
    files.write_json(run_dir / DECISION, decision)


def with_decision(config: RunConfig, *, decision: Mapping[str, Any]) -> RunConfig:
    compiled = decision.get("compile", config.model.compile is True)
    model = replace(config.model, checkpointing=decision["checkpointing"], compile=compiled)
    optim = replace(config.optim, release_gradients=bool(decision.get("release")))
    return replace(config, micro_batch=decision["micro_batch"], model=model, optim=optim)


def saved_latency(config: RunConfig, *, checkpoint: Path | None) -> LatencyTable | None:
    """The latency table of a checkpoint's run if there is a step_time limit, so that noise cannot change a choice."""
    path = None if checkpoint is None else checkpoint.parent.parent / LATENCY
    if path is None or config.budget.step_time is None or not path.is_file():
        return None
    try:
        return read_plain(LatencyTable, json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise CheckpointError(
            f"{path}, on which budget.step_time={config.budget.step_time:g} rests, cannot be read ({error}): remove it "
            "to have it measured again"
        ) from error
