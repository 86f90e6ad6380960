"""From which checkpoint a run goes on, and what it says of the settings that stay those of the checkpoint."""

from pathlib import Path

from baoc.config.schema import RunConfig
from baoc.errors import BadInputError, CheckpointError
from baoc.tracking import console, load_checked, resolve_resume


def find_checkpoint(config: RunConfig, *, run_dir: Path) -> Path | None:
    """The checkpoint that `resume` names; `auto` looks into this run's own folder, which a job that is queued again has
    used before, then beside it and at its neighbours of other days."""
    if config.resume is None:
        return None
    match = {"name": config.name, "seed": config.seed}
    found = resolve_resume("auto", run_root=run_dir, match=match) if config.resume == "auto" else None
    found = found or resolve_resume(config.resume, run_root=run_dir.parent.parent, match=match)
    if found is None and config.mode == "eval":
        raise CheckpointError(
            f"resume=auto found no intact checkpoint of name={config.name}, seed={config.seed} under "
            f"{run_dir.parent.parent}: train first, or give resume=PATH"
        )
    console.say("resume=auto found nothing to resume: starting anew" if found is None else f"resuming from {found}")
    return found


def check_resume(config: RunConfig, *, checkpoint: Path) -> None:
    """Refuses to resume what is finished, and says which settings of the optimizer stay those of the checkpoint."""
    content = load_checked(checkpoint)
    step, end = content.get("global_step", 0), config.trainer.max_steps
    if 0 < end <= step:
        raise BadInputError(
            f"{checkpoint} is of step {step} and trainer.max_steps={end}: nothing is left to train. Give a larger "
            "trainer.max_steps, or mode=eval to evaluate it"
        )
    saved = content.get("hyper_parameters", {}).get("optimizer", {})
    for key in ("lr", "betas", "eps", "weight_decay"):
        asked = getattr(config.optim, key)
        kept = tuple(saved[key]) if key in saved and isinstance(asked, tuple) else saved.get(key, asked)
        if kept != asked:
            console.say(f"resuming keeps optim.{key}={kept} of the checkpoint; optim.{key}={asked} is not applied")
