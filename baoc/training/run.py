"""One run: RunConfig in, a run folder and a RunResult out. The only place that knows all stages by name.

`run` reads top to bottom, stage by stage (docs/runs.md lists their files); what a stage does is in the module it calls.
"""

import logging
import math
import warnings
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from baoc.config.environment import commit, package_versions
from baoc.config.options import hash_own_code, instantiate_targets
from baoc.config.resolve import PLACEHOLDER_MICRO_BATCH, Resolved, choose_device, largest_divisor, resolve
from baoc.config.schema import RunConfig
from baoc.core import own_code
from baoc.core.budgets import resolve_auto
from baoc.data import MODEL_TOKENIZER, build_data
from baoc.data.base import DataModule
from baoc.data.loader import require_step
from baoc.errors import BadInputError, BudgetBreachedError, DivergedError
from baoc.models import build_model, family_of
from baoc.models.export import export_model
from baoc.models.switches import count_recomputed_layers, recomputable_layers, start_compiler
from baoc.optim.shards import is_sharded, unsharded_on_rank_0
from baoc.parallel import SINGLE_PROCESS, Ranks, ranks, refuse_several_processes
from baoc.profiling import free_bytes
from baoc.racing.entrants import write_entrants
from baoc.tasks import OptimizerSettings, build_task
from baoc.tasks.base import Task
from baoc.tracking import console, files
from baoc.tracking.loggers import finishing, log_summary, make_loggers
from baoc.training.measure.absent_card import card_of, plan_for, write_plan_totals
from baoc.training.measure.microbatch_search import SearchResult, decide, device_of, take_option
from baoc.training.prepare import prepare
from baoc.training.resume import (
    find_checkpoint,
    saved_decision,
    saved_latency,
    tell_changes,
    with_decision,
    write_decision,
)
from baoc.training.session import SessionSettings, without_scratch_measurements
from baoc.training.trainer import Parts, assemble_trainer, explained_failures, session_settings
from baoc.types import RESULT_SCHEMA, Quality, RunResult, to_plain


def run(config: RunConfig, *, run_dir: Path, command: str) -> RunResult | None:
    """Runs `config` and leaves every value of the run in `run_dir`; None for mode=plan and mode=eval.

    Raises BaocError children for what a user can mend; see docs/troubleshooting.md.
    """
    if (group := ranks()) is SINGLE_PROCESS:
        refuse_several_processes("run")
    quieten()
    if (card := card_of(config)) is not None:  # which is not here: the network is built without memory
        resolved = resolve(config, device="cuda")
        with torch.device("meta"):
            task, data = build(resolved, run_dir=run_dir, device=card.name)
        return plan_for(card, resolved.config, task=task, data=data, settings=session_settings(config), run_dir=run_dir)
    device = choose_device(config.device)
    checkpoint = group.broadcast_result(lambda: find_checkpoint(config, run_dir=run_dir))
    if device == "cpu":
        # A run that diverged to chance level fills its states with denormals, and its steps then take 6 to 8 times as
        # long. Of this thread and of those that it starts.
        torch.set_flush_denormal(True)
    L.seed_everything(config.seed, workers=True, verbose=False)
    decision = group.broadcast_result(lambda: saved_decision(config, checkpoint=checkpoint))
    latency = group.broadcast_result(lambda: saved_latency(config, checkpoint=checkpoint)) if decision else None
    resolved = resolve(with_decision(config, decision=decision) if decision else config, device=device)
    task, data = build(resolved, run_dir=run_dir, device=device)
    config = resolved.config
    settings = without_scratch_measurements(session_settings(config), network=task, pretrained=None)
    decided = None
    if decision:
        write_decision(decision, run_dir=run_dir)
    elif resolved.needs_microbatch_search:
        decided = decide_together(
            config, task=task, data=data, device=device, settings=settings, group=group, run_dir=run_dir
        )
        config, latency = decided.config, decided.latency
        settings = replace(settings, release=decided.option.release)
    loggers = make_loggers(
        config.logger.names,
        wandb=to_plain(config.logger.wandb),
        run_dir=run_dir,
        name=config.name,
        config=to_plain(config),
        group=run_dir.parent.name,
        job_type=config.mode,
        tags=tuple(
            own_code.short_name(part.name) for part in (config.task, config.model, config.budget, config.allocator)
        ),
    )
    folder = files.FolderGuard(run_dir)
    with closing(folder), finishing(loggers):
        hashes = {**hash_own_code(config), f"the data of dataset={config.dataset.name}": data.identity}
        sources = {what: sha for what, sha in hashes.items() if sha}  # of the user's code and of the data
        parts = assemble_trainer(
            config,
            task=task,
            settings=settings,
            device=device,
            run_dir=run_dir,
            loggers=loggers,
            latency=latency,
            sources=sources,
        )
        parts.strategy.known_footprint = decided.footprint if decided is not None else None
        if config.mode == "eval":
            return evaluate(parts, task=task, data=data, checkpoint=checkpoint, run_dir=run_dir)
        if checkpoint is not None:
            group.broadcast_result(lambda: tell_changes(config, checkpoint=checkpoint, sources=sources))
        with explained_failures(device), parts.preemption.listening():
            parts.trainer.fit(task, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        if config.mode == "plan":
            write_planned(config, parts=parts, task=task, data=data, device=device, run_dir=run_dir)
            return None
        if parts.trainer.interrupted:
            raise KeyboardInterrupt
        metrics = final_metrics(parts, task, data)
        parts.memory.gather_peaks()  # again, as each rank validated by itself
        unsharded = unsharded_weights(task) if config.checkpoint.export else {}
        if group.rank:
            return None  # rank 0 alone writes the result
        check_quality(metrics, task=task, step=parts.trainer.global_step)
        if config.checkpoint.export:
            with parts.memory.track("export"):
                export(task, parts=parts, folder=run_dir / "model", unsharded=unsharded)
        folder.check()
        result = result_of_run(config, parts=parts, task=task, data=data, metrics=metrics, command=command)
        write_result(result, parts=parts, run_dir=run_dir)
        return result


def decide_together(
    config: RunConfig,
    *,
    task: Task,
    data: DataModule,
    device: str,
    settings: SessionSettings,
    group: Ranks,
    run_dir: Path,
) -> SearchResult:
    """Decides how each rank's share of the batch is run: rank 0 for all, or under fully_shard all together."""
    size = config.trainer.devices
    share = replace(config, batch_size=config.batch_size // size, trainer=replace(config.trainer, devices=1))
    decide_share = partial(decide, task=task, data=data, device=device, settings=settings, run_dir=run_dir)
    if config.trainer.strategy == "fsdp" and group is not SINGLE_PROCESS:
        from baoc.training.fully_sharded import cut, one_mesh

        own_device = device_of(device)
        budget = resolve_auto(config.budget, free_bytes=-int(group.all_reduce_max(-free_bytes(own_device))[0]))
        cut(task, mesh=one_mesh(own_device), device=own_device, precision=str(config.trainer.precision))
        decided = decide_share(replace(share, budget=budget))
    else:
        decided = group.broadcast_result(lambda: decide_share(share))
        if group.rank:
            take_option(decided.option, task=task, data=data, name=config.model.name)
    whole_batch = replace(decided.config, batch_size=config.batch_size, trainer=config.trainer)
    return replace(decided, config=whole_batch)


def write_planned(config: RunConfig, *, parts: Parts, task: Task, data: DataModule, device: str, run_dir: Path) -> None:
    """Writes `plan.json` for mode=plan on the present device, and the entrants of a race with race=auto."""
    assert parts.strategy.reallocator is not None
    planner, plan = parts.strategy.reallocator.planner, parts.strategy.reallocator.plan
    rate = config.batch_size / parts.recorder.step_s_predicted
    write_plan_totals(plan, config=config, device=device, rate=rate, source="probe", run_dir=run_dir)
    if config.race.first != "off":
        num_params = sum(p.numel() for p in task.parameters())
        write_entrants(
            planner, config=config, data=data.spec, num_params=num_params, quality=task.quality, run_dir=run_dir
        )


def quieten() -> None:
    """Silences warnings of Lightning and torch that do not concern a run."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=r"The number of training batches \(\d+\) is smaller than the logging")
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    warnings.filterwarnings("ignore", message=".*sync_dist=True")  # each rank validates the whole set
    warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated", category=FutureWarning)


# -- stages 1 and 2: data, model, task --------------------------------------------------------------------------------


def build(resolved: Resolved, *, run_dir: Path, device: str) -> tuple[Task, DataModule]:
    """Builds the LightningModule and the DataModule, and prints the start-up summary."""
    config = resolved.config
    if device == "cuda" and config.model.compile is True:
        start_compiler()
    micro_batch, accumulate = config.micro_batch_size, config.accumulation
    if resolved.needs_microbatch_search and not isinstance(config.micro_batch, int):
        micro_batch = largest_divisor(config.batch_size, at_most=PLACEHOLDER_MICRO_BATCH)
        accumulate = max(1, config.batch_size // (micro_batch * config.trainer.devices))
    with torch.device("cpu"):  # real also where the network has no memory: sizes and classes are values
        data = build_data(
            config.dataset.name,
            task=config.task.name,
            path=config.dataset.path,
            batch_size=micro_batch,
            accumulate=accumulate,
            seed=config.seed,
            **own_tokenizer(instantiate_targets(config.dataset.options), config=config),
        )
    refuse_early(resolved, data=data)
    stored = {"pretrained": config.model.pretrained, "new_head": config.model.new_head}
    options = {
        **instantiate_targets(config.model.options),
        **(stored if family_of(config.model.name).needs_pretrained else {}),
    }
    model = build_model(config.model.name, spec=data.spec, size=config.model.size, seed=config.seed, **options)
    preparations = prepare(model, config.model, seed=config.seed)
    resize_to: Any = getattr(data, "resize_to", None)
    if resize_to is not None and isinstance(size := getattr(model, "image_size", None), int):
        resize_to(size)
    not_the_tasks = ("backend", "matching", "nonfinite", "release_gradients")
    optim = {key: value for key, value in asdict(config.optim).items() if key not in not_the_tasks}
    task = build_task(
        config.task.name,
        model=model,
        spec=data.spec,
        seed=config.seed,
        optimizer=OptimizerSettings(**optim),
        **instantiate_targets(config.task.options),
    )
    num_params = sum(p.numel() for p in model.parameters())
    count = config.batch_size // config.micro_batch_size  # micro-batches of all devices
    summary = {
        "task": config.task.name,
        "model": f"{config.model.name}, size {resolved.size.name} ({resolved.size_reason}), {num_params:,} parameters",
        "data": str(data.spec),
        "device": device,
        "budget": console.describe_budget(config.budget),
        "batch": f"{config.batch_size}" + (f" = {count} x {config.micro_batch_size}" if count > 1 else ""),
        "steps": f"{config.trainer.max_steps}" if config.trainer.max_steps > 0 else None,
        "seed": f"{config.seed}",
        "chosen": "; ".join((*resolved.reasons, *preparations)) or None,
    }
    console.print_key_values(config.name, summary, run_dir=run_dir)
    return task, data


def refuse_early(resolved: Resolved, *, data: DataModule) -> None:
    """Raises BadInputError, before a network is built, for what loader or Lightning would refuse only once a step is
    measured: a strategy without devices, and an epoch that is too short."""
    config, num_train = resolved.config, data.spec.num_train
    trainer = config.trainer
    if ranks() is SINGLE_PROCESS and trainer.strategy != "auto":
        raise BadInputError(
            f"trainer.strategy={trainer.strategy} is of several devices: set trainer.devices=N, or leave it out"
        )
    if config.mode == "eval" or trainer.overfit_batches or not num_train:  # a stream does not know its length
        return
    require_step(config.batch_size, num_train=num_train)
    if resolved.needs_microbatch_search:  # which decides how many micro-batches an epoch has
        return
    batches, limit = num_train // config.batch_size * config.accumulation, trainer.limit_train_batches
    if isinstance(limit, float) and limit * batches < 1:
        raise BadInputError(
            f"trainer.limit_train_batches={limit:g} of the {batches} batches of an epoch is less than one: give a "
            "number of batches, or a larger share"
        )
    if limit is not None:
        batches = min(batches, limit) if isinstance(limit, int) else int(limit * batches)
    interval = trainer.val_check_interval
    if trainer.check_val_every_n_epoch is not None and isinstance(interval, int) and interval > batches:
        raise BadInputError(
            f"trainer.val_check_interval={interval} is more than the {batches} batches of an epoch: lower it, or set "
            "trainer.check_val_every_n_epoch=null to count batches over epochs"
        )


def own_tokenizer(options: dict[str, Any], *, config: RunConfig) -> dict[str, Any]:
    """The options of a data set, with `tokenizer=model` replaced by the stored network's. Raises BadInputError if there
    is no stored network, or for bytes if it has a tokenizer."""
    given, stored = options.get("tokenizer"), config.model.pretrained
    needs_pretrained = family_of(config.model.name).needs_pretrained
    if given == MODEL_TOKENIZER and stored is None:
        raise BadInputError(
            "dataset.tokenizer=model is the one that is stored beside model.pretrained, which is not given: name it, "
            "or a tokenizer"
        )
    has_own = needs_pretrained and stored is not None and (Path(stored).expanduser() / "tokenizer.json").is_file()
    if given == "bytes" and has_own:
        raise BadInputError(
            f"dataset.tokenizer=bytes cuts text into bytes, and {stored} has a tokenizer of its own: set "
            "dataset.tokenizer=model"
        )
    if given != MODEL_TOKENIZER:
        return options
    is_folder = Path(str(stored)).expanduser().is_dir()
    return {**options, "tokenizer": stored if is_folder or config.dataset.name == "chat" else f"hub:{stored}"}


# -- stage 13: the result ---------------------------------------------------------------------------------------------


def final_metrics(parts: Parts, task: Task, data: L.LightningDataModule) -> dict[str, float]:
    """val/ metrics of the last step. If the training loop did not end on a validation, validates once more."""
    values = parts.trainer.callback_metrics
    if parts.validation.step != parts.trainer.global_step:
        task.zero_grad(set_to_none=True)  # else gradients move to the device and back with the weights
        trainer = L.Trainer(
            strategy=parts.strategy.evaluator(),
            accelerator=parts.strategy.root_device.type,
            devices=1,
            plugins=[LightningEnvironment()],
            callbacks=[parts.memory.final_validation()],
            precision=parts.trainer.precision,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=parts.trainer.limit_val_batches,
        )
        trainer.validate(task, datamodule=data, verbose=False)
        values = trainer.callback_metrics
    return {key: float(value) for key, value in values.items() if key.startswith("val/")}


def check_quality(metrics: Mapping[str, float], *, task: Task, step: int) -> None:
    """Raises DivergedError if the task's quality metric is not finite."""
    name, _ = task.quality
    if not math.isfinite(metrics.get(name, math.nan)):
        raise DivergedError(
            f"training ended at step {step} with {name} = {metrics.get(name, 'never measured')}: lower optim.lr, set "
            "trainer.gradient_clip_val, or let it validate (trainer.val_check_interval)"
        )


def result_of_run(
    config: RunConfig, *, parts: Parts, task: Task, data: DataModule, metrics: dict[str, float], command: str
) -> RunResult:
    trainer, reallocator = parts.trainer, parts.strategy.reallocator
    assert reallocator is not None
    plan, optimizer = reallocator.plan, reallocator.optimizer
    name, higher = task.quality
    budget = parts.strategy.budget
    peak, state = parts.memory.highest_bytes, optimizer.state_bytes()
    if budget.memory_bytes is not None:  # earlier budgets of the run were enforced while they were in force
        limit, met = budget.memory_bytes, parts.memory.peak_bytes <= budget.memory_bytes
    elif budget.state_fraction is not None:
        limit = plan.limits.state_bytes
        met = limit is None or state <= limit
    else:
        limit, met = None, None
    return RunResult(
        schema=RESULT_SCHEMA,
        task=config.task.name,
        model=config.model.name,
        name=config.name,
        allocator=config.allocator.name,
        risk=config.risk.name,
        num_params=sum(p.numel() for p in task.parameters()),
        budget={"kind": budget.kind, "name": budget.name, "limit": limit, "step_time": budget.step_time},
        budget_bytes=limit,
        budget_met=met,
        binding=plan.binding,
        least_feasible_bytes=plan.least_feasible_bytes,
        peak_bytes=peak,
        peak_bytes_predicted=parts.memory.highest_predicted_bytes,
        peak_by_stretch=dict(parts.memory.peaks),
        num_ranks=parts.strategy.ranks.size,
        peak_by_rank=parts.memory.peak_by_rank,
        state_bytes=state,
        state_bytes_predicted=plan.allocation.state_bytes,
        state_bytes_adamw=plan.state_bytes_adamw,
        step_ms=parts.steps.step_ms,
        samples_per_s=parts.steps.samples_per_s,
        quality=Quality(name=name, value=metrics[name], higher_is_better=higher),
        metrics=metrics,
        risk_total=plan.allocation.risk,
        allocation_gap=plan.allocation.gap,
        num_reallocations=reallocator.num_accepted,
        num_steps=trainer.global_step,
        seed=config.seed,
        commit=commit(),
        versions=package_versions(),
        command=command,
        step_s_predicted=parts.recorder.step_s_predicted,
        dataset=data.spec.dataset,
        data_sha256=data.identity,
        code_sha256=hash_own_code(config),
        recomputed_layers=count_recomputed_layers(task.model),
        num_layers=len(recomputable_layers(task.model)),
    )


def unsharded_weights(task: Task) -> dict[str, torch.Tensor]:
    """On rank 0, by name: the task's averaged weights, if it averages, and all other sharded parameters, gathered."""
    averages = task.ema.unsharded() if task.ema is not None else {}
    sharded = {name: param for name, param in task.named_parameters() if is_sharded(param) and name not in averages}
    return {**unsharded_on_rank_0(sharded), **averages}


def export(task: Task, *, parts: Parts, folder: Path, unsharded: Mapping[str, torch.Tensor]) -> None:
    """Writes the network as its library loads it, in float32 even if the optimizer keeps bf16 weights. The result's
    quality is that of the weights in `unsharded`, see `unsharded_weights`."""
    assert parts.strategy.reallocator is not None
    task.zero_grad(set_to_none=True)  # to make room for float32 copies
    weights = {name: value.to("cpu", torch.float32) for name, value in unsharded.items()}
    if not unsharded and any(p.dtype != torch.float32 for p in task.model.parameters()):
        weights = parts.strategy.reallocator.optimizer.export_weights()
    named = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    export_model(task.model, folder=folder, weights=named)


def write_result(result: RunResult, *, parts: Parts, run_dir: Path) -> None:
    """Writes result.json, the run's frontier and W&B's summary, and prints the result.

    Raises BudgetBreachedError if the run held more than its budget.
    """
    files.write_json(run_dir / "result.json", result)
    parts.recorder.concluded(result)
    from baoc.frontier.build import write_frontier

    write_frontier(run_dir, show=False, page=False)
    log_summary(parts.loggers, result=result)
    console.print_result(result, run_dir=run_dir)
    if result.budget_met is False:
        raise BudgetBreachedError(
            f"the run held more than budget {result.budget['name']} allows, see result.json in {run_dir}: lower "
            "micro_batch, or give a larger budget"
        )


def evaluate(parts: Parts, *, task: Task, data: L.LightningDataModule, checkpoint: Path | None, run_dir: Path) -> None:
    """mode=eval: validates with the checkpoint's weights and writes `eval.json`."""
    values: list[Any] = parts.trainer.validate(
        task, datamodule=data, ckpt_path=checkpoint, verbose=False, weights_only=True
    )
    files.write_json(run_dir / "eval.json", {"schema": RESULT_SCHEMA, "checkpoint": str(checkpoint), **values[0]})
    console.say("  ".join(f"{key} {value:.4g}" for key, value in values[0].items()))
