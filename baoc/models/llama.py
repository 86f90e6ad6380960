"""Freshly initialised language models of transformers: Llama by named size, or any causal model by its config.

transformers takes seconds to import, so it is imported only when a network is built.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from baoc.core.blocks import role_of
from baoc.errors import BadInputError, first_line
from baoc.types import TextDataSpec

VOCAB_SIZE = 32_000  # of the published sizes, for data without a vocabulary
_HOW = "give a config.json, its folder, or a name that the library's cache or the hub has"
_LAYER = re.compile(r"\b(?:layers?|h|blocks?)\.(\d+)\.")
# Model types whose logits are the product of the last hidden state and the head, with nothing between.
_PLAIN_HEAD = {"llama", "gpt2", "gpt_neox", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "opt"}


def build(
    settings: Mapping[str, int], *, spec: Any, source: str, name_or_path: str | None, vocab_size: int
) -> "CausalLM":
    """Builds the model of the size's `settings` (width, hidden, depth, heads), or of `name_or_path` with source=hf.

    `vocab_size` 0 takes the data's. Raises BadInputError for data that is not text, a vocabulary that is too small, and
    a configuration that cannot be read.
    """
    if not isinstance(spec, TextDataSpec):
        raise BadInputError(f"model llama reads text; a data set described by {type(spec).__name__} has none")
    if source not in ("sizes", "hf"):
        raise BadInputError(f"model.source={source} is not allowed: choose sizes (Llama, by model.size) or hf (any)")
    if source == "hf" and name_or_path is None:
        raise BadInputError("model.source=hf needs model.name_or_path: a config.json, its folder, or a name on the hub")
    if source == "sizes" and name_or_path is not None:
        raise BadInputError(f"model.name_or_path={name_or_path} is read with model.source=hf only")
    if name_or_path is not None:
        config = read_config(name_or_path, key="model.name_or_path", how=_HOW)
        config.use_cache = False
        config.pad_token_id = None  # a number would freeze that row of the embedding
        config.vocab_size = vocab_size or config.vocab_size
    else:
        config = llama_config(settings, vocab_size=vocab_size or spec.vocab_size or VOCAB_SIZE, spec=spec)
    check_fit(config, spec=spec)
    from transformers import AutoModelForCausalLM

    return CausalLM(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def llama_config(settings: Mapping[str, int], *, vocab_size: int, spec: TextDataSpec) -> Any:
    """The shapes used by GaLore: untied embeddings, no biases, no grouped-query attention."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=settings["width"],
        intermediate_size=settings["hidden"],
        num_hidden_layers=settings["depth"],
        num_attention_heads=settings["heads"],
        max_position_embeddings=max(2048, spec.sequence_length),
        rms_norm_eps=1e-6,
        initializer_range=0.02,
        tie_word_embeddings=False,
        pad_token_id=None,  # a number would freeze that row of the embedding
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
    )


class CausalLM(nn.Module):
    """Tokens (B, T), int64 -> logits (B, T, vocabulary). `net` is the library's model.

    `checkpoint_units` are the modules whose activations may be recomputed.
    """

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net: Any = net
        self.train()  # transformers returns models in evaluation mode

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """`positions` (B, T) restart at 0 with each text of a row; attention then does not cross texts."""
        with _unpacked_if_fake(tokens):
            return self.net(input_ids=tokens, **_position_arguments(positions)).logits

    def features(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """The last hidden state (B, T, width), of which `head` makes logits.

        Raises BadInputError for model types that may compute more than that.
        """
        kind = self.net.config.model_type
        if kind not in _PLAIN_HEAD:
            raise BadInputError(f"task.loss_chunk is not known to be right for a model of type {kind}: set it to 0")
        with _unpacked_if_fake(tokens):
            return self.net.base_model(input_ids=tokens, **_position_arguments(positions)).last_hidden_state

    @property
    def head(self) -> nn.Module:
        return self.net.get_output_embeddings()

    @property
    def checkpoint_units(self) -> list[nn.Module]:
        lists = [module for module in self.net.modules() if isinstance(module, nn.ModuleList)]
        return list(max(lists, key=len, default=[]))

    def parameter_blocks(self) -> dict[str, tuple[str, ...]]:
        """Block name -> names of its parameters, each exactly once; `layers.N.attention`, `.mlp`, `.norm` by layer.

        Vectors form a norm block, so that other blocks hold matrices only. A tied head belongs to the embedding.
        """
        types = {name: type(module).__name__ for name, module in self.named_modules()}
        blocks: dict[str, list[str]] = {}
        for name, parameter in self.named_parameters():
            role = role_of(name, shape=parameter.shape, module_type=types[name.rpartition(".")[0]])
            layer = _LAYER.search(name)
            block = role.value if layer is None else f"layers.{layer.group(1)}.{role.value}"
            blocks.setdefault(block, []).append(name)
        return {block: tuple(names) for block, names in blocks.items()}


def _position_arguments(positions: Tensor | None) -> dict[str, Any]:
    return {"use_cache": False} if positions is None else {"use_cache": False, "position_ids": positions}


@contextmanager
def _unpacked_if_fake(tokens: Tensor) -> Iterator[None]:
    """Tells transformers that each row of a fake batch is one sequence.

    The library searches positions for packed sequences. It cannot read the values of fake tensors, and would then build
    an attention mask for each layer, which a step with real tensors does not have.
    """
    if not isinstance(tokens, torch._subclasses.FakeTensor):
        yield
        return
    from transformers import masking_utils

    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


def read_config(name_or_path: str, *, key: str, how: str) -> Any:
    """Reads a configuration of transformers: its file, its folder, or a name in the library's cache or on the hub.

    The messages of BadInputError name the setting `key`, and say `how` to set it.
    """
    from transformers import AutoConfig

    path = Path(name_or_path).expanduser()
    folder = path.parent if path.is_file() else path
    if not folder.is_dir() and (path.is_absolute() or name_or_path.startswith((".", "~"))):
        raise BadInputError(f"{key}={name_or_path} does not exist: {how}")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise BadInputError(f"{key}={name_or_path}: there is no config.json in {folder}: {how}")
    try:
        return AutoConfig.from_pretrained(str(folder) if folder.is_dir() else name_or_path)
    except Exception as error:  # OSError, ValueError, and errors of the network
        raise BadInputError(f"{key}={name_or_path} gives no configuration ({first_line(error)}): {how}") from error


def check_fit(config: Any, *, spec: TextDataSpec) -> None:
    """Raises BadInputError unless the model has an embedding for every token and a position for a whole sequence."""
    vocab_size, positions = config.vocab_size, getattr(config, "max_position_embeddings", None)
    if vocab_size < spec.vocab_size:
        raise BadInputError(
            f"the model knows {vocab_size} tokens, but the tokenizer of dataset {spec.dataset} has {spec.vocab_size}: "
            f"give model.vocab_size={spec.vocab_size} or more, or another dataset.tokenizer"
        )
    if positions is not None and positions < spec.sequence_length:
        raise BadInputError(
            f"the model has {positions} positions, too few for dataset.sequence_length={spec.sequence_length}"
        )
