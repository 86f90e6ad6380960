"""Names, roles, layers and groups of parameters, from modules, named parameters, plain ones and parameter groups."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from baoc.errors import BadInputError
from baoc.profiling import describe
from baoc.types import Role


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.ModuleDict({"query": nn.Linear(8, 4), "key": nn.Linear(8, 4)}) for _ in range(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


class Network(nn.Module):
    """Two layers, a tied embedding and head, and a fused projection stored (in, out)."""

    def __init__(self, *, tied: bool = True):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.up = nn.ConvTranspose2d(8, 4, 2)
        self.lm_head = nn.Linear(8, 10, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight


def by_name(source, **kwargs):
    return {param.name: param for param in describe(source, **kwargs)}


def test_module_in_its_own_order_with_shapes_and_roles():
    params = describe(Network(tied=False))
    assert [param.name for param in params] == [name for name, _ in Network(tied=False).named_parameters()]
    found = {param.name: param for param in params}
    assert found["embed.weight"].shape == (10, 8)
    assert found["embed.weight"].role is Role.EMBEDDING
    assert found["lm_head.weight"].role is Role.HEAD
    assert found["layers.0.mlp.0.weight"].role is Role.MLP
    assert found["layers.0.mlp.0.bias"].role is Role.NORM
    assert found["layers.1.attn.heads.0.key.weight"].role is Role.ATTENTION
    assert found["layers.1.norm.weight"].dtype == "float32"


def test_a_tied_parameter_comes_once_with_its_other_names():
    found = by_name(Network())
    assert found["embed.weight"].aliases == ("lm_head.weight",)
    assert "lm_head.weight" not in found


def test_frozen_parameters_are_left_out_and_layers_keep_their_numbers():
    network = Network()
    network.layers[0].requires_grad_(False)
    found = by_name(network)
    assert not any(name.startswith("layers.0") for name in found)
    assert found["layers.1.norm.weight"].depth == 1


def test_depth_counts_layers_but_neither_heads_nor_parts_of_an_mlp():
    found = by_name(Network())
    assert {found[f"layers.0.attn.heads.{head}.query.weight"].depth for head in range(2)} == {0}
    assert found["layers.1.mlp.2.weight"].depth == 1
    assert found["embed.weight"].depth is None


def test_layers_nest_as_in_a_unet():
    outer = nn.ModuleList(nn.ModuleDict({"resnets": nn.ModuleList([Layer(), Layer()])}) for _ in range(2))
    network = nn.ModuleDict({"down_blocks": outer, "out": nn.Linear(8, 8)})
    depths = [param.depth for param in describe(network) if param.name.endswith("norm.weight")]
    assert depths == [0, 1, 2, 3]


def test_transposed_weights_are_marked_and_turned():
    found = by_name(Network())
    assert found["up.weight"].transposed
    assert found["up.weight"].matrix_shape == (4 * 2 * 2, 8)
    assert not found["up.bias"].transposed


def test_gpt2_conv1d_is_transposed():
    from transformers.pytorch_utils import Conv1D

    (weight, _) = describe(Conv1D(12, 8))
    assert weight.transposed
    assert weight.matrix_shape == (12, 8)


def test_a_model_on_meta_is_described_as_the_real_one():
    with torch.device("meta"):
        on_meta = describe(Network())
    assert on_meta == describe(Network())


def test_groups_give_their_index_and_leave_out_the_rest():
    network = Network()
    norms = [p for name, p in network.named_parameters() if "norm" in name]
    optimizer = torch.optim.AdamW([{"params": norms, "weight_decay": 0.0}, {"params": [network.embed.weight]}])
    found = by_name(network, optimizer_groups=optimizer.param_groups)
    assert found["layers.0.norm.weight"].group == 0
    assert found["embed.weight"].group == 1
    assert len(found) == len(norms) + 1


def test_a_parameter_that_the_module_does_not_have_is_refused():
    stranger = nn.Parameter(torch.zeros(3, 5))
    with pytest.raises(BadInputError, match=r"group 0 .* shape \(3, 5\) that the module does not have"):
        describe(Network(), optimizer_groups=[{"params": [stranger]}])


def test_a_parameter_in_two_groups_is_refused():
    network = Network()
    groups = [{"params": [network.embed.weight]}, {"params": [network.lm_head.weight]}]
    with pytest.raises(BadInputError, match=r"'embed.weight' is in groups 0 and 1"):
        describe(network, optimizer_groups=groups)


def test_a_duplicate_within_a_group_counts_once():
    weight = nn.Parameter(torch.zeros(2, 3))
    (param,) = describe([weight, weight])
    assert (param.name, param.aliases) == ("param0", ())


def test_plain_parameters_are_numbered_by_position():
    params = describe([nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))])
    assert [(p.name, p.role) for p in params] == [("param0", Role.OTHER), ("param1", Role.NORM)]


def test_named_parameters_without_their_module_still_tell_layers():
    named = [(name, p) for name, p in Network().named_parameters() if "attn" in name or "embed" in name]
    found = by_name(named)
    assert found["layers.1.attn.heads.0.key.weight"].depth == 1
    assert found["layers.1.attn.heads.0.key.weight"].role is Role.ATTENTION
    assert found["embed.weight"].depth is None


def test_groups_can_be_the_source_with_torch_s_own_names():
    network = Network()
    pairs = list(network.named_parameters())
    groups = torch.optim.AdamW([{"params": pairs[:2]}, {"params": pairs[2:]}]).param_groups
    found = by_name(groups)
    assert list(found) == [name for name, _ in pairs]
    assert {found[name].group for name, _ in pairs[2:]} == {1}


def test_two_tensors_of_one_name_are_refused():
    pairs = [("w", nn.Parameter(torch.zeros(2))), ("w", nn.Parameter(torch.zeros(2)))]
    with pytest.raises(BadInputError, match=r"two parameters are called 'w'"):
        describe(pairs)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_a_lazy_module_has_to_see_a_batch_first():
    with pytest.raises(BadInputError, match=r"'weight' has no shape yet, as its layer is lazy: run one"):
        describe(nn.LazyLinear(3))


def of(**modules: nn.Module) -> nn.Module:
    """A network with these modules as attributes, in their order."""
    network = nn.Module()
    for name, module in modules.items():
        network.add_module(name, module)
    return network


def encoder_layers(count: int = 2) -> nn.ModuleList:
    return nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(count))


def line(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def layer(**modules: nn.Module) -> nn.Module:
    return of(attn=nn.MultiheadAttention(8, 2), **modules)


HEADS = {
    "mnist": (of(conv1=nn.Conv2d(1, 4, 3), fc1=nn.Linear(16, 8), fc2=nn.Linear(8, 3)), ["fc2"]),
    "gpt": (of(tok=nn.Embedding(9, 8), blocks=encoder_layers(), to_logits=nn.Linear(8, 9)), ["to_logits"]),
    "fc before out": (of(enc=nn.Linear(4, 8), fc=nn.Linear(8, 8), out=nn.Linear(8, 3)), ["fc", "out"]),
    "vit": (of(patch=nn.Conv2d(3, 8, 4), t=encoder_layers(), mlp_head=nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 3))),
            ["mlp_head.1"]),
    "recurrent": (of(emb=nn.Embedding(9, 8), rnn=nn.GRU(8, 8), decoder=nn.Linear(8, 9)), ["decoder"]),
    "perceptron": (line(8, 16, 16, 3), ["2"]),
    "autoencoder": (of(encoder=line(16, 8, 2), decoder=line(2, 8, 16)), ["decoder.1"]),
    "sequence": (nn.Sequential(nn.Embedding(9, 8), *encoder_layers(), nn.Linear(8, 9)), ["3"]),
    "unlike the layers": (
        nn.Sequential(nn.Embedding(9, 8), *encoder_layers(), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 9))), ["3.1"]
    ),
    "list": (of(layers=nn.ModuleList(line(8, 8, 8, 3))), ["layers.2"]),
    "head named and first": (of(lm_head=nn.Linear(8, 9), blocks=encoder_layers()), ["lm_head"]),
    "layers alone": (of(tok=nn.Embedding(9, 8), blocks=encoder_layers()), []),
    "one layer": (nn.TransformerEncoderLayer(8, 2, 16), []),
    "one layer in a list": (nn.Sequential(*encoder_layers(1)), []),
    "convolutions": (of(time_mlp=line(8, 8), down=nn.Conv2d(3, 4, 3), outc=nn.Conv2d(4, 3, 1)), []),
    "last is tied": (Network(), []),
    "heads of other shapes": (of(cls=nn.Linear(8, 9), box=of(layers=nn.ModuleList(line(8, 8, 4)))), ["box.layers.1"]),
    "scores by attention": (of(emb=nn.Embedding(9, 8), rnn=nn.GRU(8, 8), attn=nn.Linear(8, 1), out=nn.Linear(8, 2)),
                            ["out"]),
    "experts in the last layer": (
        of(layers=nn.ModuleList([layer(mlp=of(up=nn.Linear(8, 16), down=nn.Linear(16, 8))),
                                 layer(mlp=of(experts=nn.ModuleList(line(8, 16)), shared=nn.Linear(8, 8)))])), []
    ),
    "another beside a named head": (of(proj_out=nn.Linear(8, 3), caption=line(4, 8)), ["proj_out"]),
    "another after fc": (of(enc=nn.Linear(4, 8), fc=nn.Linear(8, 3), gate=nn.Linear(8, 4)), ["fc"]),
    "a router beside it": (of(trunk=line(8, 8), router=nn.Linear(8, 3), out=nn.Linear(8, 3)), ["out"]),
    "a router": (of(experts=nn.ModuleList(line(8, 8, 8)), router=nn.Linear(8, 2)), []),
    "two layers as attributes": (of(tok=nn.Embedding(9, 8), block1=layer(mlp=line(8, 16, 8)),
                                    block2=layer(mlp=line(8, 16, 8))), []),
    "two linear layers": (of(tok=nn.Embedding(9, 8), layer1=nn.Linear(8, 16), layer2=nn.Linear(16, 8)), []),
    "two linear layers of one shape": (of(layer1=nn.Linear(8, 8), layer2=nn.Linear(8, 8)), []),
    "two projections": (of(enc=nn.Linear(4, 8), image=nn.Linear(8, 5), text=nn.Linear(8, 5)), []),
    "two critics": (of(q1=line(8, 16, 1), q2=line(8, 16, 1)), []),
    "two towers": (of(user=line(8, 16, 16), item=line(8, 16, 16)), []),
    "actor and critic": (of(trunk=line(8, 16), actor=nn.Linear(16, 4), critic=nn.Linear(16, 1)),
                         ["actor", "critic"]),
    "three outputs": (of(trunk=line(8, 16), rgb=nn.Linear(16, 3), normal=nn.Linear(16, 3), sigma=nn.Linear(16, 1)),
                      ["rgb", "normal", "sigma"]),
    "actor and critic of layers": (of(actor=line(8, 16, 4), critic=line(8, 16, 1)), ["actor.1", "critic.1"]),
    "before a table": (of(embedding=nn.Embedding(9, 8), t=encoder_layers(), transform=nn.Linear(8, 8)), []),
    "a pooler": (of(patch=nn.Conv2d(3, 8, 4), t=encoder_layers(), pooler=nn.Linear(8, 8)), []),
    "tokens as an mlp is wide": (of(embed=nn.Embedding(16, 8), t=encoder_layers(), out=nn.Linear(8, 16)), ["out"]),
    "before a second table": (of(embed=nn.Embedding(9, 8), embed_more=nn.Embedding(9, 6), t=encoder_layers(),
                                 project=nn.Linear(8, 6)), []),
    "two inputs of one number": (of(x=nn.Linear(1, 8), time=nn.Linear(1, 8), mid=line(8, 8), u=nn.Linear(8, 1)), ["u"]),
    "points that are embedded": (of(embed=nn.Linear(2, 8), mid=line(8, 8), out=nn.Linear(8, 2)), ["out"]),
    "codebooks": (of(q=nn.ModuleList(of(inner=nn.Linear(8, 4), book=nn.Embedding(9, 4)) for _ in range(2))), []),
}  # fmt: skip
UNET = {"down": nn.Conv2d(3, 8, 3), "up": nn.Conv2d(8, 3, 3)}
HEADS |= {f"a U-Net's {name}": (of(**UNET, **{name: line(8, 16, 16)}), []) for name in ("time_mlp", "t_proj", "cond")}
HEADS |= {"a U-Net's two conditions": (of(**UNET, t_proj=nn.Linear(8, 16), labels=nn.Linear(4, 16)), [])}


@pytest.mark.parametrize("name", HEADS)
def test_the_last_linear_layer_is_the_head_whatever_it_is_called(name: str):
    network, heads = HEADS[name]
    want = [f"{head}.weight" for head in heads]
    assert [p.name for p in describe(network) if p.role is Role.HEAD] == want
    assert [p.name for p in describe(list(network.named_parameters())) if p.role is Role.HEAD] == want


def test_a_grid_of_features_is_no_convolution_that_ends_in_an_image():
    network = of(trunk=line(8, 16), rgb=nn.Linear(16, 3))
    network.register_parameter("plane", nn.Parameter(torch.zeros(1, 4, 8, 8)))
    assert [p.name for p in describe(network) if p.role is Role.HEAD] == ["rgb.weight"]


def test_transposed_convolutions_that_end_in_few_channels_give_the_output():
    network = of(down=nn.Conv2d(1, 8, 3), up=nn.ConvTranspose2d(8, 1, 3), labels=nn.Linear(4, 16))
    assert not [p.name for p in describe(network) if p.role is Role.HEAD]


def test_names_alone_do_not_tell_that_a_table_is_the_head():
    network: Any = of(
        tok=nn.Embedding(9, 8), t=encoder_layers(), transform=nn.Linear(8, 8), out=nn.Linear(8, 9, bias=False)
    )
    network.out.weight = network.tok.weight
    for source in (network, list(network.named_parameters())):
        assert not [p.name for p in describe(source) if p.role is Role.HEAD]


def test_a_frozen_head_is_the_head_still():
    network = line(8, 8, 3)
    network[1].requires_grad_(False)
    assert [p.role for p in describe(network) if len(p.shape) > 1] == [Role.OTHER]
