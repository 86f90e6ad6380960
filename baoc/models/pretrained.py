"""Loads the user's weights: a folder for the library's `from_pretrained`, or a safetensors file.

Loading is strict: every tensor of the network must be there with its shape, and no others. Only the head may keep its
initial values, on request. Error messages name the tensors that do not match.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from baoc.core.blocks import role_of
from baoc.errors import BadInputError, first_line
from baoc.types import Role

_MAX_NAMES = 4  # of tensors in an error message
_ORIGIN = "_baoc_origin"  # attribute in which a network keeps its `pretrained_reason`
# Names of heads, and of poolers before heads, in transformers, timm and torchvision
_HEADS = frozenset({"pooler", "classifier", "head", "lm_head", "score", "cls", "fc", "qa_outputs", "pre_logits"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Names of the parameters that keep their initial values, and of the stored tensors that were not loaded."""

    fresh: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def load_pretrained(model: nn.Module, path: str, *, new_head: bool = False) -> Loaded:
    """Loads the weights at `path` into `model` in place.

    With `new_head`, the head keeps its initial values, and heads and poolers that only the stored network has are
    ignored. A folder is read by the network's library, including settings such as the epsilon of norms.

    Raises:
        BadInputError: a path without weights; missing, unexpected or differently shaped tensors; two stored tensors
            with different values for one (tied) parameter; NaN.
    """
    location = Path(path).expanduser()
    if not location.exists():
        raise BadInputError(
            f"model.pretrained={path} does not exist: give a folder of from_pretrained or a safetensors file"
        )
    head = head_names(model) if new_head else ()
    if location.is_dir() and (location / "config.json").is_file() and hasattr(model, "net"):
        ignored = _load_folder(model, location, head=head, path=path)
    else:
        ignored = _load_file(model, _weights_file(location, path=path), head=head, path=path)
    refuse_nonfinite(model, path=path)
    return Loaded(fresh=head, left_out=ignored)


def pretrained_reason(network: nn.Module) -> str:
    """Why the network counts as pretrained; "" if it does not, or shows no sign of it.

    peft and diffusers leave a name in the module; transformers marks each parameter that `from_pretrained` read. A
    loaded state dict leaves no sign. `fully_shard` removes the marks, see `remember_origin`. Frozen parameters do not
    count.
    """
    if (remembered := vars(network).get(_ORIGIN)) is not None:
        return remembered
    for module in network.modules():
        if not any(param.requires_grad for param in module.parameters()):
            continue
        if getattr(module, "peft_config", None):
            return "adapters of peft are trained"
        config = getattr(module, "config", None)
        if isinstance(config, Mapping) and config.get("_name_or_path"):
            return f"its weights are those of {config['_name_or_path']}"
    params = [param for param in network.parameters() if param.requires_grad]
    read = sum(param.numel() for param in params if getattr(param, "_is_hf_initialized", False))
    return "its weights were read by from_pretrained" if 2 * read > sum(param.numel() for param in params) else ""


def remember_origin(network: nn.Module) -> None:
    """Stores `pretrained_reason` in the network, before `fully_shard` replaces the marked parameters."""
    setattr(network, _ORIGIN, pretrained_reason(network))


def refuse_nonfinite(model: nn.Module, *, path: str) -> None:
    """Raises BadInputError if weights loaded from `path` are NaN or infinite."""
    bad = [
        name
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point() and tensor.numel() and not tensor.is_meta and not tensor.isfinite().all()
    ]
    if bad:
        raise BadInputError(
            f"model.pretrained={path} holds weights that are NaN or infinite ({_first_few(bad)}): its training had "
            "diverged, or the file is damaged; get it anew"
        )


def head_names(model: nn.Module) -> tuple[str, ...]:
    types = {name: type(module).__name__ for name, module in model.named_modules()}
    heads = [
        name.rpartition(".")[0]
        for name, parameter in model.named_parameters()
        if role_of(name, shape=parameter.shape, module_type=types[name.rpartition(".")[0]]) is Role.HEAD
    ]
    return tuple(name for name, _ in model.named_parameters() if name.rpartition(".")[0] in heads)


def _weights_file(location: Path, *, path: str) -> Path:
    files = [location] if location.is_file() else sorted(location.glob("*.safetensors"))
    if len(files) != 1 or files[0].suffix != ".safetensors":
        names = ", ".join(file.name for file in files) or "none"
        raise BadInputError(
            f"model.pretrained={path} must be one safetensors file, or a folder with config.json and the weights that "
            f"from_pretrained reads; safetensors files there: {names}"
        )
    return files[0]


def _load_file(model: nn.Module, file: Path, *, head: tuple[str, ...], path: str) -> tuple[str, ...]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        stored_tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise BadInputError(f"model.pretrained={path} cannot be read ({error}): get it anew") from error
    expected = model.state_dict()
    # name -> the name by which `named_parameters` lists the parameter: another one for tied weights
    first_name: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    listed_name = {name: first_name.setdefault(id(parameter), name) for name, parameter in named}
    prefix = getattr(getattr(model, "net", None), "base_model_prefix", "")
    tensors: dict[str, Tensor] = {}
    stored_as: dict[str, str] = {}  # parameter -> the first stored tensor for it
    for stored, tensor in stored_tensors.items():
        name = _named_as(stored, expected, prefix=prefix)
        if name in head:
            continue
        first = stored_as.setdefault(listed_name.get(name, name), stored)
        if first != stored and not torch.equal(stored_tensors[first], tensor):
            raise BadInputError(
                f"model.pretrained={path} holds {first} and {stored} with different values, and this network has one "
                f"parameter for both ({listed_name.get(name, name)}): take a network whose weights are not tied, or "
                "remove one of the two"
            )
        tensors[name] = tensor
    ignored = _stored_heads([name for name in tensors if name not in expected]) if head else ()
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ignored}
    missing = [name for name in expected if listed_name.get(name, name) not in stored_as and name not in head]
    _refuse_mismatch(
        path,
        missing=missing,
        unexpected=[name for name in tensors if name not in expected],
        shapes={
            name: (tuple(tensor.shape), tuple(expected[name].shape))
            for name, tensor in tensors.items()
            if name in expected and tensor.shape != expected[name].shape
        },
        head=head_names(model),
    )
    model.load_state_dict(tensors, strict=False)
    return ignored


def _stored_heads(names: Iterable[str]) -> tuple[str, ...]:
    """Those of `names` that belong to a head or pooler."""
    return tuple(name for name in names if not _HEADS.isdisjoint(name.split(".")[:-1]))


def _load_folder(model: nn.Module, folder: Path, *, head: tuple[str, ...], path: str) -> tuple[str, ...]:
    net: Any = model.net
    settings: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    if hasattr(net, "config") and hasattr(net.config, "num_labels"):
        settings["num_labels"] = net.config.num_labels
    try:
        loaded, info = type(net).from_pretrained(folder, **settings)
    except Exception as error:  # OSError, ValueError, errors of safetensors and of other libraries' config.json
        raise BadInputError(
            f"model.pretrained={path} cannot be read by {type(net).__name__} ({first_line(error)})"
        ) from error
    ours, theirs = dict(net.named_parameters()), dict(loaded.named_parameters())
    mismatched = {name for name, *_ in info["mismatched_keys"]}
    fresh = {name.removeprefix("net.") for name in head}
    own_shapes = {name: tuple(shape) for name, shape, *_ in info["mismatched_keys"]}
    ignored = _stored_heads(info["unexpected_keys"]) if head else ()
    _refuse_mismatch(
        path,
        missing=[
            f"net.{name}" for name in [*info["missing_keys"], *(ours.keys() - theirs.keys())] if name not in fresh
        ],
        unexpected=[
            f"net.{name}" for name in [*info["unexpected_keys"], *(theirs.keys() - ours.keys())] if name not in ignored
        ],
        shapes={
            f"net.{name}": (own_shapes.get(name, tuple(theirs[name].shape)), tuple(ours[name].shape))
            for name in ours.keys() & theirs.keys()
            if name not in fresh and (name in mismatched or ours[name].shape != theirs[name].shape)
        },
        head=head_names(model),
    )
    for name in fresh:
        theirs[name].data.copy_(ours[name].data)
    loaded.float().train(net.training)
    model.net = loaded
    return ignored


def _named_as(name: str, expected: Mapping[str, Tensor], *, prefix: str = "") -> str:
    """The network's name for a stored tensor, which may have or lack prefixes: `net.` of the wrapper, `model.` of the
    task, and `prefix` of the library's network without its head."""
    bare = name.removeprefix("model.")
    for candidate in (name, bare, f"net.{name}", f"net.{bare}", f"net.{prefix}.{name}"):
        if candidate in expected:
            return candidate
    return name


def _refuse_mismatch(
    path: str,
    *,
    missing: list[str],
    unexpected: list[str],
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
    head: tuple[str, ...],
) -> None:
    """Raises BadInputError unless all are empty; a head for other classes has its own message.

    `shapes`: name -> (stored shape, shape in this network).
    """
    if not missing and not unexpected and not shapes:
        return
    if not missing and not unexpected and set(shapes) <= set(head):
        name = next(iter(shapes))
        theirs, ours = shapes[name]
        raise BadInputError(
            f"model.pretrained={path} has a head for {theirs[0]} classes ({name}), the data has {ours[0]}: set "
            "model.new_head=true to start with a fresh head, or take the data that it was trained on"
        )
    parts = [
        *([f"missing: {_first_few(missing)}"] if missing else []),
        *([f"not in this network: {_first_few(unexpected)}"] if unexpected else []),
        *(
            [f"of another shape: {_first_few([f'{n} {a} instead of {b}' for n, (a, b) in shapes.items()])}"]
            if shapes
            else []
        ),
    ]
    raise BadInputError(
        f"model.pretrained={path} does not fit this network; {'; '.join(parts)}. Choose the model and model.size that "
        "it was saved from"
    )


def _first_few(names: list[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
