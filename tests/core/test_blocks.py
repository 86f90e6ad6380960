"""Roles from names and types, and how parameters become blocks: model, then patterns, then layer and role."""

from dataclasses import replace

import pytest

from baoc.core.blocks import partition, role_of
from baoc.errors import BadInputError
from baoc.types import Block, Role
from tests.support.decision import param, transformer


@pytest.mark.parametrize(
    ("name", "shape", "module_type", "role"),
    [
        ("vit.embeddings.cls_token", (1, 1, 32), "ViTEmbeddings", Role.EMBEDDING),
        ("vit.embeddings.position_embeddings", (1, 197, 32), "ViTEmbeddings", Role.EMBEDDING),
        ("vit.embeddings.patch_embeddings.projection.weight", (32, 3, 16, 16), "Conv2d", Role.EMBEDDING),
        ("vit.layers.0.attention.q_proj.weight", (32, 32), "Linear", Role.ATTENTION),
        ("vit.encoder.layer.3.attention.attention.query.weight", (32, 32), "Linear", Role.ATTENTION),
        ("vit.encoder.layer.3.attention.output.dense.weight", (32, 32), "Linear", Role.ATTENTION),
        ("vit.encoder.layer.3.output.dense.weight", (32, 64), "Linear", Role.MLP),
        ("vit.encoder.layer.3.intermediate.dense.weight", (64, 32), "Linear", Role.MLP),
        ("model.layers.0.mlp.gate_proj.weight", (64, 32), "Linear", Role.MLP),
        ("model.layers.0.input_layernorm.weight", (32,), "LlamaRMSNorm", Role.NORM),
        ("model.layers.0.self_attn.q_proj.bias", (32,), "Linear", Role.NORM),  # fewer than two dimensions
        ("norm.weight", (4, 8), "LayerNorm", Role.NORM),
        ("lm_head.weight", (50, 32), "Linear", Role.HEAD),
        ("classifier.weight", (10, 32), "Linear", Role.HEAD),
        ("final_layer.linear.weight", (16, 32), "Linear", Role.HEAD),
        ("final_layer.adaLN_modulation.1.weight", (64, 32), "Linear", Role.MODULATION),
        ("transformer_blocks.0.norm1.linear.weight", (96, 32), "Linear", Role.MODULATION),
        ("down_blocks.0.resnets.0.time_emb_proj.weight", (32, 64), "Linear", Role.MODULATION),
        ("down_blocks.0.resnets.0.conv1.weight", (32, 32, 3, 3), "Conv2d", Role.CONV),
        ("conv_out.weight", (3, 32, 3, 3), "Conv2d", Role.HEAD),
        ("down_blocks.0.attentions.0.proj_out.weight", (32, 32), "Linear", Role.ATTENTION),  # not the network's
        ("down_blocks.0.attentions.0.transformer_blocks.0.ff.net.0.proj.weight", (64, 32), "Linear", Role.MLP),
        ("transformer.h.0.attn.c_attn.weight", (32, 96), "Conv1D", Role.ATTENTION),
        ("transformer.h.0.c_fc.weight", (32, 96), "Conv1D", Role.OTHER),
        ("transformer.wte.weight", (50, 32), "Embedding", Role.EMBEDDING),
        ("layers.0.self_attn.in_proj_weight", (96, 32), "MultiheadAttention", Role.ATTENTION),
        ("layers.0.linear1.weight", (64, 32), "Linear", Role.MLP),
        ("pooler.dense.weight", (32, 32), "Linear", Role.OTHER),
    ],
)
def test_role_of(name: str, shape: tuple[int, ...], module_type: str, role: Role):
    assert role_of(name, shape=shape, module_type=module_type) is role


def members(blocks: tuple[Block, ...]) -> dict[str, list[str]]:
    return {block.name: [p.name for p in block.params] for block in blocks}


def test_by_layer_and_role():
    blocks = partition(transformer(layers=2))
    assert [block.name for block in blocks] == [
        *("embedding", "layer0.attention", "layer0.norm", "layer0.mlp"),
        *("layer1.attention", "layer1.norm", "layer1.mlp", "norm", "head"),
    ]
    attention = blocks[1]
    assert (attention.role, attention.depth, len(attention.params)) == (Role.ATTENTION, 0, 4)
    assert all(p.matrix_shape is not None for p in attention.params), "a bias would keep matrix rules off the block"
    assert (blocks[0].role, blocks[0].depth) == (Role.EMBEDDING, None)


@pytest.mark.parametrize(
    ("by", "names"),
    [
        ("layer", ["embedding", "layer0", "layer1", "norm", "head"]),
        ("role", ["embedding", "attention", "norm", "mlp", "head"]),
        ("model", ["model"]),
    ],
)
def test_other_granularities(by: str, names: list[str]):
    assert [block.name for block in partition(transformer(layers=2), by=by)] == names


def test_by_tensor_names_blocks_after_parameters():
    params = transformer(layers=1)
    assert members(partition(params, by="tensor")) == {p.name: [p.name] for p in params}


def test_a_block_takes_the_role_of_most_of_its_elements_and_no_depth_across_layers():
    layer0, layer1 = (b for b in partition(transformer(layers=2), by="layer") if b.name.startswith("layer"))
    assert (layer0.role, layer0.depth, layer1.depth) == (Role.MLP, 0, 1)
    (whole,) = partition(transformer(layers=2), by="model")
    assert whole.depth is None


def test_the_model_is_asked_before_layer_and_role():
    params = transformer(layers=1)
    tower = [p.name for p in params if "layers.0" in p.name and "norm" not in p.name]
    blocks = members(partition(params, declared={"tower": tower, "frozen": ["not.trainable"]}))
    assert blocks["tower"] == tower
    assert set(blocks) == {"embedding", "tower", "layer0.norm", "norm", "head"}


def test_patterns_override_the_model_and_the_first_one_wins():
    params = transformer(layers=2)
    blocks = members(
        partition(
            params,
            declared={"everything": [p.name for p in params]},
            patterns=[(r"attn\1", r"layers\.(\d)\.self_attn\..*weight"), ("biases", "*.bias"), ("up", "*.up_proj.*")],
        )
    )
    assert blocks["attn1"] == [f"layers.1.self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_proj")]
    assert len(blocks["biases"]) == 8
    assert "layers.0.mlp.down_proj.weight" in blocks["everything"]


def test_tied_weights_are_one_parameter_by_any_of_their_names():
    params = transformer(layers=1)[:-1]
    params[0] = replace(params[0], aliases=("lm_head.weight",))
    by_model = members(partition(params, declared={"in": ["embed_tokens.weight"], "out": ["lm_head.weight"]}))
    assert by_model["in"] == ["embed_tokens.weight"]
    assert "out" not in by_model
    assert members(partition(params, patterns=[("tied", "lm_head.*")]))["tied"] == ["embed_tokens.weight"]


def test_what_a_user_gets_wrong_is_named():
    params = transformer(layers=1)
    with pytest.raises(BadInputError, match="there is no trainable parameter to optimize: unfreeze one"):
        partition([])
    with pytest.raises(
        BadInputError, match=r"unknown blocks.by 'layers': choose one of layer_role, layer_part, layer, role"
    ):
        partition(params, by="layers")
    with pytest.raises(BadInputError, match=r"'attn' \(block 'a'\) matches no parameter .* whole name.*embed_tokens"):
        partition(params, patterns=[("a", "attn")])
    with pytest.raises(BadInputError, match=r"'.*down_proj.*' .*that an earlier pattern left"):
        partition(params, patterns=[("a", "*.mlp.*"), ("b", "*down_proj*")])
    with pytest.raises(BadInputError, match=r"declares parameter 'norm.weight' in two blocks, 'a' and 'b'"):
        partition(params, declared={"a": ["norm.weight"], "b": ["norm.weight"]})
    with pytest.raises(BadInputError, match=r"parameters given twice: norm.weight"):
        partition([*params, param("norm.weight", 64, module_type="RMSNorm")])
