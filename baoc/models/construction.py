"""Builds networks independently of the caller's default dtype and random state, and networks of the user's code."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from baoc.core import own_code
from baoc.errors import BadInputError


@contextmanager
def float32_and_seed(seed: int | None) -> Iterator[None]:
    """Inside, the default dtype is float32, and the CPU generator has the `seed` unless it is None. Restores both."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with seeded(seed):
            yield
    finally:
        torch.set_default_dtype(dtype)


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Inside, the CPU generator has the `seed`; afterwards its former state. None does nothing."""
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        yield


def group_by_block(model: nn.Module, block_of: Callable[[str, int], str]) -> dict[str, tuple[str, ...]]:
    """Block name -> names of its parameters, each exactly once. `block_of(name, number of dimensions)` is the block.

    Networks put the vectors of a layer (biases, norms) into its norm block. So other blocks hold matrices only, and
    rules by row or column apply to them.
    """
    blocks: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        blocks.setdefault(block_of(name, parameter.ndim), []).append(name)
    return {block: tuple(names) for block, names in blocks.items()}


def build_user_model(name: str, *, spec: Any, options: Mapping[str, Any]) -> nn.Module:
    """Calls the user's function or class `name` with `options` and returns the network.

    An argument named `spec`, or like a field of the data's description (`num_classes`, `vocab_size`, ...), is passed
    unless `options` have it or the data do not. Raises BadInputError for a result that is no network, and for one that
    needs memory on the meta device.
    """
    fields = asdict(spec) if spec is not None else {}
    offered = {"spec": spec, **{key: value for key, value in fields.items() if value is not None}}  # None: unknown
    meta = torch.get_default_device().type == "meta"
    try:
        network = own_code.call(name, key="model", options=options, offered=offered)
    except BadInputError as error:
        if not meta or error.__cause__ is None:
            raise
        raise BadInputError(
            f"{error}. It is built without memory here (torch's meta device), as the card that is planned for is not "
            "in this machine; code that reads values of its weights cannot be: plan on a machine with the card"
        ) from error.__cause__
    if not isinstance(network, nn.Module):
        raise BadInputError(f"model={name} returned a {type(network).__name__}: it must return a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise BadInputError(f"model={name} returned a {type(network).__name__} without parameters to train")
    for param_name, param in network.named_parameters():
        if meta and not param.is_meta:
            raise BadInputError(
                f"model={name} puts {param_name} on {param.device} itself, so it cannot be planned for a card that is "
                "not here: leave the device to torch.device(...), or plan on a machine with the card"
            )
    return network.train()
