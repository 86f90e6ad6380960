"""Optimizer checkpoints: tensors and plain values only, keyed by parameter name, and convertible between plans.

Schema 2: {"baoc_schema": 2, "num_steps": int, "param_groups": [{settings, "param_names", "params": indices}],
"state": {index: {key: tensor}}, "blocks": {block: {"spec", "rule", "storage", "weights", "params", and "match",
"tuned" and "unseeded" if there are any}}}. State and groups are laid out as torch's, so that tools for torch's
optimizers collect them. torch.distributed.checkpoint's get_optimizer_state_dict is one: it replaces indices by names of
its own, and drops the other keys. So the first group has these too, as JSON under "baoc".

The model's checkpoint has the weights. torch.optim.AdamW's checkpoint is read and written too. `optim.loading` fills an
optimizer from a checkpoint that was read here.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from baoc.core.catalogue import SPECS
from baoc.core.recipes import BlockTuning
from baoc.errors import BadInputError, CheckpointError
from baoc.optim import groups
from baoc.optim import migrate as migration
from baoc.optim.migrate import ConversionReport
from baoc.optim.registry import BlockRegistry
from baoc.optim.shards import unsharded
from baoc.optim.state import ParsedCheckpoint, allocate, checkpoint_state, new_step, slot_with_spec
from baoc.types import OptimizerSpec

SCHEMA = 2
MAX_STEPS = 2**53  # of `num_steps`; more would not be a count in float64
_COLLECTED = "baoc"  # key of the first group that has all but states and settings, as JSON
_TORCH_KEYS = {"step": "step", "m": "exp_avg", "v": "exp_avg_sq"}  # of spec adamw, and of torch's AdamW


def save(registry: BlockRegistry, *, param_groups: list[dict[str, Any]], num_steps: int) -> dict[str, Any]:
    """The checkpoint. Tensors share memory with the live ones, as in torch: copy or write them before the next step.

    Each has a storage of its own, so that a file of all or some of them holds their bytes and no others. Loaded states
    of parameters that are still frozen are saved again.
    """
    registry.drop_stale_corrections()
    registry.synchronize()
    index = {name: i for i, name in enumerate(name for group in param_groups for name in group["param_names"])}
    state = {
        index[slot.name]: {
            **checkpoint_state(slot, registry.state[slot.param], spec=live.spec),
            **registry.entries_of_others(slot),
        }
        for live in registry.live.values()
        for slot in live.slots
    }
    blocks: dict[str, dict[str, Any]] = {}
    for name, live in registry.live.items():
        names, tuned = [slot.name for slot in live.slots], live.slots[0].tuned if live.slots else None
        blocks[name] = _spec_entry(live.spec, params=names, unseeded=live.unseeded, tuned=tuned)
        blocks[name] |= {} if live.match is None else {"match": live.match}
    if (pending := registry.pending_states) is not None:
        for name in (name for name in pending.states if name in index):
            state[index[name]] = dict(pending.states[name])
            tuned = pending.tuned.get(name)
            entry = _spec_entry(pending.specs[name], params=[name], unseeded=pending.unseeded, tuned=tuned)
            block_name = name
            while block_name in blocks:
                block_name += "_waiting"
            blocks[block_name] = entry
    own = {"baoc_schema": SCHEMA, "num_steps": num_steps, "blocks": blocks}
    groups = _plain_groups(param_groups)
    groups[0][_COLLECTED] = json.dumps(own, default=Tensor.tolist)
    return {**own, "param_groups": groups, "state": state}


def _spec_entry(
    spec: OptimizerSpec, *, params: list[str], unseeded: Collection[str], tuned: BlockTuning | None
) -> dict[str, Any]:
    unseeded = [name for name in params if name in unseeded]
    entry = {"spec": spec.name, "rule": spec.rule, "storage": spec.storage, "weights": spec.weights, "params": params}
    if tuned is not None:
        entry["tuned"] = {"lr": tuned.lr, "betas": None if tuned.betas is None else list(tuned.betas)}
    return {**entry, "unseeded": unseeded} if unseeded else entry


def stored_alike(a: OptimizerSpec, b: OptimizerSpec) -> bool:
    """True if states and weights of both have the same formats, whatever the specs are called."""
    return (a.rule, a.storage, a.weights) == (b.rule, b.storage, b.weights)


def _plain_groups(param_groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups with running indices in place of parameters, as torch writes them."""
    plain, start = [], 0
    for group in param_groups:
        settings = {key: groups.to_plain(value) for key, value in group.items() if key not in ("params", "param_names")}
        indices = list(range(start, start + len(group["params"])))
        plain.append({**settings, "params": indices, "param_names": list(group["param_names"])})
        start += len(indices)
    return plain


def read(checkpoint: Mapping[str, Any], *, names: Sequence[str]) -> ParsedCheckpoint:
    """Parses BAOC's or torch.optim.AdamW's checkpoint. `names` are this optimizer's in group order, for one without.

    Raises CheckpointError for any other.
    """
    if not isinstance(checkpoint, Mapping):
        raise CheckpointError(
            f"this is no optimizer checkpoint but a {type(checkpoint).__name__}: pass what state_dict() returned"
        )
    try:
        if "baoc_schema" in checkpoint:
            return _named(_read_own(checkpoint))
        if set(checkpoint) >= {"state", "param_groups"}:
            if (dropped := _dropped_by_collecting(checkpoint)) is not None:
                return _named(_read_own({**checkpoint, **dropped}))
            return _named(_read_torch(checkpoint, names=names))
    except CheckpointError:
        raise
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(
            f"the optimizer checkpoint is damaged ({type(error).__name__}: {error}): use another one, or start afresh"
        ) from error
    raise CheckpointError(
        f"this is no optimizer checkpoint (its keys are {', '.join(map(str, checkpoint)) or 'none'}): BAOC reads its "
        "own and torch.optim.AdamW's"
    )


def _named(saved: ParsedCheckpoint) -> ParsedCheckpoint:
    """Returns `saved`. Raises TypeError for a name that is no string."""
    names = [*saved.states, *saved.specs, *saved.unseeded, *(name for group, _ in saved.groups for name in group)]
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{name!r} is no name of a parameter")
    return saved


def _dropped_by_collecting(checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
    """What `save` wrote beside state and groups, from the first group; None if the checkpoint is not BAOC's."""
    texts = [group[_COLLECTED] for group in checkpoint["param_groups"] if _COLLECTED in group]
    if texts:
        own = json.loads(texts[0])
        for entry in own["blocks"].values():
            if "match" in entry:
                entry["match"] = torch.tensor(entry["match"], dtype=torch.float32)
        return own
    torch_keys = set(_TORCH_KEYS.values())
    if any(isinstance(key, str) and set(state) != torch_keys for key, state in checkpoint["state"].items()):
        raise CheckpointError(
            "the optimizer checkpoint was collected by name, and its states are not torch.optim.AdamW's: which of "
            "BAOC's they are is what flatten_optimizer_state_dict=True drops. Save it without, or save "
            "optimizer.state_dict() itself"
        )
    return None


def _names_of(group: Mapping[str, Any]) -> dict[Any, str]:
    """Key of each parameter's state in a group -> the parameter's name. If a tool has put the model's names in place of
    indices, they are in this optimizer's order, while "param_names" are in that of the optimizer that was saved. So
    equal names are matched by name."""
    keys, names = group["params"], group["param_names"]
    same = set(keys) == set(names)
    return {key: key if same else name for key, name in zip(keys, names, strict=True)}


def _read_own(checkpoint: Mapping[str, Any]) -> ParsedCheckpoint:
    if checkpoint["baoc_schema"] != SCHEMA:
        raise CheckpointError(
            f"the optimizer checkpoint has schema {checkpoint['baoc_schema']}, this version reads {SCHEMA}: load it "
            "with the version of baoc that wrote it"
        )
    absent = [key for key in ("num_steps", "param_groups", "state", "blocks") if key not in checkpoint]
    if absent:
        raise CheckpointError(f"the optimizer checkpoint lacks {', '.join(absent)}: it is damaged, use another one")
    damaged = [name for name, state in checkpoint["state"].items() if not isinstance(state, Mapping)]
    if damaged or type(checkpoint["num_steps"]) is not int or not 0 <= checkpoint["num_steps"] <= MAX_STEPS:
        raise TypeError(f"state of {damaged[0]}" if damaged else "num_steps is no count")
    names = {key: name for group in checkpoint["param_groups"] for key, name in _names_of(group).items()}
    states = {names[key]: state for key, state in checkpoint["state"].items()}
    specs, matches, unseeded, tuned = {}, {}, set(), {}
    for block, entry in checkpoint["blocks"].items():
        try:
            spec = _read_spec(entry)
        except BadInputError as error:
            raise CheckpointError(f"block {block} of the checkpoint cannot be read: {error}") from error
        specs |= dict.fromkeys(entry["params"], spec)
        unseeded |= set(entry.get("unseeded", ()))
        if "tuned" in entry:
            lr, betas = entry["tuned"]["lr"], entry["tuned"]["betas"]
            own = BlockTuning(lr=float(lr), betas=None if betas is None else (float(betas[0]), float(betas[1])))
            tuned |= dict.fromkeys(entry["params"], own)
        if "match" in entry:
            if (
                not isinstance(entry["match"], Tensor)
                or entry["match"].shape != (2,)
                or not entry["match"].isfinite().all()
                or entry["match"][0] < 0
            ):
                raise TypeError(f"match of block {block}")
            matches[block] = (tuple(entry["params"]), entry["match"])
    return ParsedCheckpoint(
        states=states,
        specs=specs,
        groups=[_saved_group(group, names=group["param_names"]) for group in checkpoint["param_groups"]],
        matches=matches,
        unseeded=frozenset(unseeded),
        tuned=tuned,
        num_steps=checkpoint["num_steps"],
    )


def _read_spec(entry: Mapping[str, Any]) -> OptimizerSpec:
    """The spec of a block, by its rule, storage and weights if they were saved: users may choose names of own specs."""
    if not isinstance(entry["spec"], str):
        raise TypeError(f"{entry['spec']!r} is no name of a spec")
    if "rule" not in entry:
        return groups.resolve_spec(entry["spec"])
    traits = {key: entry[key] for key in ("rule", "storage", "weights")}
    return groups.resolve_spec(OptimizerSpec(name=entry["spec"], description="", **traits))


def _saved_group(group: Mapping[str, Any], *, names: Sequence[str]) -> tuple[tuple[str, ...], dict[str, Any]]:
    return tuple(names), {
        key: value for key, value in group.items() if key not in ("params", "param_names", _COLLECTED)
    }


def _read_torch(checkpoint: Mapping[str, Any], *, names: Sequence[str]) -> ParsedCheckpoint:
    """Parses torch.optim.AdamW's checkpoint: by its names if it has them, else by position, as torch does."""
    total = sum(len(group["params"]) for group in checkpoint["param_groups"])
    if not all("param_names" in group for group in checkpoint["param_groups"]) and total != len(names):
        raise CheckpointError(
            f"the torch checkpoint has {total} parameters without names, this optimizer has {len(names)}: save it "
            "from an optimizer built on named_parameters(), or load it into one with the same parameters"
        )
    by_index: dict[int, str] = {}
    saved_groups = []
    for group in checkpoint["param_groups"]:
        if not {"betas", "eps"} <= set(group):  # SGD's, whose states may be none
            raise CheckpointError(
                f"a parameter group of the checkpoint has {', '.join(map(str, group))}: it is that of another "
                "optimizer than torch.optim.AdamW. Start afresh, or load AdamW's"
            )
        group_names = group.get("param_names") or [names[len(by_index) + i] for i in range(len(group["params"]))]
        by_index |= dict(zip(group["params"], group_names, strict=True))
        saved_groups.append(_saved_group(group, names=group_names))
    states = {}
    for index, entry in checkpoint["state"].items():
        name = by_index[index]
        if set(entry) != set(_TORCH_KEYS.values()):
            raise CheckpointError(
                f"the state of {name} in the checkpoint has {', '.join(entry) or 'nothing'}: BAOC reads its own states "
                "and torch.optim.AdamW's without amsgrad (step, exp_avg, exp_avg_sq)"
            )
        states[name] = {key: entry[torch_key] for key, torch_key in _TORCH_KEYS.items()}
        states[name]["step"] = new_step(int(entry["step"]))  # old checkpoints have a plain number
    steps = [int(state["step"]) for state in states.values()]
    adamw = dict.fromkeys(by_index.values(), SPECS["adamw"])
    return ParsedCheckpoint(states=states, specs=adamw, groups=saved_groups, num_steps=max(steps, default=0))


def to_adamw(registry: BlockRegistry, *, param_groups: list[dict[str, Any]]) -> dict[str, Any]:
    """A state dict for torch.optim.AdamW over the same groups, on the CPU.

    States that a rule does not keep are inferred, or left out if they are unknown.
    """
    plain = _plain_groups(param_groups)
    flags = {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False}
    index = {name: i for group in plain for i, name in zip(group["params"], group["param_names"], strict=True)}
    states: dict[int, dict[str, Tensor]] = {}
    for live in registry.live.values():
        for slot in live.slots:
            adamw = slot_with_spec(slot, spec=SPECS["adamw"])
            (new,) = allocate([adamw])
            with registry.states_on_device(live, write_back=False):
                state = registry.state[slot.param]
                v_unknown = migration.convert(
                    *migration.gather_if_needed(slot, state, spec=live.spec, into=adamw.rule.info),
                    adamw,
                    new,
                    spec=SPECS["adamw"],
                    betas=slot.betas(param_groups),
                    report=ConversionReport(),
                    before_first_step=False,
                    old_v_initialised=slot.name not in live.unseeded,
                )
            if new.get("step", 0) > 0 and not v_unknown:
                tensors = {
                    key: unsharded(value) for key, value in checkpoint_state(adamw, new, spec=SPECS["adamw"]).items()
                }
                states[index[slot.name]] = {torch_key: tensors[key].cpu() for key, torch_key in _TORCH_KEYS.items()}
    extra = {"fused": None, "decoupled_weight_decay": True}
    return {"state": states, "param_groups": [{**flags, **extra, **group} for group in plain]}
