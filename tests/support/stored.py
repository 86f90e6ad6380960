"""Tiny networks and tokenizers of transformers, saved as a user has them on disk."""

from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_tokenizer(folder: Path, *, template: str | None = TEMPLATE) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["</s>", "<mask>", "<user>", "<assistant>", "<system>"]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    library = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=library, eos_token="</s>", mask_token="<mask>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def save_llama(folder: Path, **changes: Any) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=300, max_position_embeddings=64, **(size | changes))
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def save_bert(folder: Path) -> Path:
    from transformers import BertConfig, BertForMaskedLM

    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(vocab_size=300, max_position_embeddings=64, **size)).save_pretrained(folder)
    return folder


def save_vit(folder: Path, *, num_labels: int = 10) -> Path:
    from transformers import ViTConfig, ViTForImageClassification

    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=num_labels, **size)
    ViTForImageClassification(config).save_pretrained(folder)
    return folder
