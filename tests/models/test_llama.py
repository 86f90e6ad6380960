"""Language models: published sizes, blocks, what the data decides, and any causal model by its configuration."""

import json

import pytest
import torch

from baoc.errors import BadInputError
from baoc.models import build_model, choose_size
from baoc.models.switches import set_recomputed
from baoc.profiling import describe
from baoc.types import Role, TextDataSpec


def text(vocab_size: int = 256, *, sequence_length: int = 16) -> TextDataSpec:
    return TextDataSpec(
        dataset="x", vocab_size=vocab_size, sequence_length=sequence_length, num_train=9, num_val=9, bytes_per_token=1.0
    )


def meta(size: str, *, spec: TextDataSpec, **options):
    with torch.device("meta"):
        return build_model("llama", spec=spec, size=size, **options)


def counts(model) -> tuple[int, int]:
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), len(parameters)


def test_nano_on_bytes_is_the_default_of_a_cpu():
    assert choose_size("llama").size.name == "nano"
    model = build_model("llama", spec=text())
    assert counts(model) == (492_384, 39)
    assert model.training
    assert model(torch.zeros(2, 16, dtype=torch.int64)).shape == (2, 16, 256)


def test_vocabulary_is_the_datas_unless_it_says_none_or_the_user_more():
    def rows(spec: TextDataSpec, **options) -> int:
        return meta("nano", spec=spec, **options).net.lm_head.weight.shape[0]

    assert rows(text(300)) == 300
    assert rows(text(0)) == 32_000
    assert rows(text(300), vocab_size=512) == 512


def test_head_is_its_own_and_every_row_of_the_embedding_learns():
    model = build_model("llama", spec=text(), seed=0)
    assert model.net.lm_head.weight is not model.net.model.embed_tokens.weight
    model(torch.arange(256).view(2, 128)).logsumexp(-1).mean().backward()
    assert (model.net.model.embed_tokens.weight.grad.abs().sum(1) > 0).all()


def test_matrices_start_with_deviation_002_and_norms_at_one():
    for name, parameter in build_model("llama", spec=text(), seed=0).named_parameters():
        if parameter.ndim == 1:
            assert (parameter == 1).all(), name
        else:
            assert abs(parameter.std().item() - 0.02) < 5e-4, name


def test_tokens_do_not_see_what_comes_behind_them():
    model = build_model("llama", spec=text(), seed=0)
    tokens = torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 9:] += 100
    one, other = model(tokens), model(changed)
    torch.testing.assert_close(one[0, :9], other[0, :9])
    assert not torch.allclose(one[0, 9:], other[0, 9:])


def test_checkpointed_layers_run_twice_and_give_the_same_gradients():
    tokens = torch.arange(32).view(2, 16)
    plain, recomputed = (build_model("llama", spec=text(), seed=0) for _ in range(2))
    calls = []
    recomputed.net.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    assert set_recomputed(recomputed, name="llama") == 4
    for model in (plain, recomputed):
        model(tokens).logsumexp(-1).mean().backward()
    assert len(calls) == 2
    for a, b in zip(plain.parameters(), recomputed.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


# -- any model of the library -----------------------------------------------------------------------------------------

GPT2 = {"model_type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}


def write_config(folder, config: dict) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("config", [GPT2, QWEN3], ids=["gpt2", "qwen3"])
def test_tied_model_of_the_library_comes_out_in_natural_blocks(config, tmp_path):
    model = build_model("llama", spec=text(), source="hf", name_or_path=write_config(tmp_path, config), seed=0)
    blocks = model.parameter_blocks()
    parts = [f"layers.{layer}.{part}" for layer in range(2) for part in ("attention", "mlp", "norm")]
    assert set(blocks) == {"embedding", "norm", *parts}
    named = dict(model.named_parameters())
    assert sorted(name for names in blocks.values() for name in names) == sorted(named)
    infos = {info.name: info for info in describe(model)}
    embedding = next(infos[name] for name in blocks["embedding"] if infos[name].aliases)
    assert embedding.aliases == ("net.lm_head.weight",)
    assert all(infos[name].role is Role.MLP for name in blocks["layers.1.mlp"])
    assert {infos[name].transposed for name in blocks["layers.0.attention"]} == {config is GPT2}
    model(torch.arange(64).view(1, 64)).logsumexp(-1).mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters() if p.ndim > 1)


def test_configuration_may_be_given_by_its_file_and_its_vocabulary_enlarged(tmp_path):
    write_config(tmp_path, GPT2)
    model = build_model(
        "llama", spec=text(), source="hf", name_or_path=str(tmp_path / "config.json"), vocab_size=300, seed=0
    )
    assert model.net.config.vocab_size == 300
    assert model(torch.zeros(1, 8, dtype=torch.int64)).shape == (1, 8, 300)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "hub"}, "model.source=hub is not allowed: choose sizes .* or hf"),
        ({"source": "hf"}, "model.source=hf needs model.name_or_path"),
        ({"name_or_path": "gpt2"}, "model.name_or_path=gpt2 is read with model.source=hf only"),
        ({"source": "hf", "name_or_path": "./nowhere"}, "model.name_or_path=./nowhere does not exist"),
        ({"vocab_size": 100}, "knows 100 tokens, but the tokenizer of dataset x has 256: give model.vocab_size=256"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(BadInputError, match=message):
        build_model("llama", spec=text(), **options)


def test_folder_without_a_configuration_or_with_a_wrong_one_is_named(tmp_path):
    def build(**changes):
        name = write_config(tmp_path, GPT2 | changes) if changes else str(tmp_path)
        return build_model("llama", spec=text(sequence_length=100), source="hf", name_or_path=name)

    with pytest.raises(BadInputError, match=r"there is no config.json in .*test_folder"):
        build()
    with pytest.raises(BadInputError, match=r"name_or_path=.*test_folder.* gives no configuration"):
        build(model_type="nothing")
    with pytest.raises(BadInputError, match="knows 99 tokens"):
        build(vocab_size=99)
    with pytest.raises(BadInputError, match=r"64 positions, too few for dataset.sequence_length=100"):
        build(n_positions=64)
