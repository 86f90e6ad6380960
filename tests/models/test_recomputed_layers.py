"""Which layers of a network are recomputed, that as many are as was asked for, and that gradients do not change."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from baoc.errors import BadInputError
from baoc.models.switches import count_recomputed_layers, recomputable_layers, set_recomputed
from tests.support.layered import Layer, Net, gradients


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Layer() for _ in range(3)))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Net(3), Net(3)


class Declared(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()
        self.net.checkpoint_units = [self.net.layers[2]]


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(nn.Embedding(5, 8), nn.TransformerEncoder(layer, 3), nn.Linear(8, 5))


@pytest.mark.parametrize(
    ("make", "kind", "count"),
    [
        (Net, Layer, 4),
        (encoder, nn.TransformerEncoderLayer, 3),
        (Pair, Layer, 6),
        (
            lambda: nn.ModuleDict({"stem": nn.Linear(3, 8), "stages": nn.ModuleList(Stage() for _ in range(4))}),
            Layer,
            12,
        ),
        (lambda: nn.ModuleDict({"layers": nn.ModuleList(Experts() for _ in range(6))}), Experts, 6),
        (Declared, Layer, 1),
        (lambda: Net(normed=True), Layer, 0),
        (lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), nn.Linear, 0),
        (lambda: nn.ModuleDict({"body": nn.Linear(99, 99), "ends": Net(2)}), Layer, 0),
        (lambda: nn.Linear(2, 2), nn.Linear, 0),
    ],
    ids=["list", "torch's", "encoder-decoder", "stages", "experts", "declared", "counts", "mixed", "minor", "none"],
)
def test_layers_are_those_that_are_declared_or_repeated(make: Callable[[], nn.Module], kind: type, count: int):
    found = recomputable_layers(make())
    assert len(found) == count and all(type(layer) is kind for layer in found)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_any_number_of_recomputed_layers_gives_the_same_bits(dropout: float, autocast: bool):
    torch.manual_seed(0)
    net, inputs, ran = Net(dropout=dropout), torch.randn(5, 3), []
    for layer in net.layers:
        layer.up.register_forward_hook(lambda *_: ran.append(1))
    kept = gradients(net, inputs)
    assert len(ran) == 4
    for count in (1, 3, 4, 2, 0):
        assert set_recomputed(net, count, name="net") == count
        assert count_recomputed_layers(net) == count
        ran.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            found = gradients(net, inputs)
        if autocast:
            set_recomputed(net, 0)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                kept, again = gradients(net, inputs), len(ran)
            assert again == 4 + count + 4
        else:
            assert len(ran) == 4 + count
        assert all(torch.equal(a, b) for a, b in zip(found, kept, strict=True))


def test_the_first_layers_are_recomputed_and_no_more_than_there_are():
    net = Net()
    set_recomputed(net, 2, name="net")
    assert [type(layer) is Layer for layer in net.layers] == [False, False, True, True]
    assert set_recomputed(net, 3, name="net") == 3 and count_recomputed_layers(net) == 3
    with pytest.raises(BadInputError, match="checkpointing=5 is more than the 4 layers of model net: give 0 to 4"):
        set_recomputed(net, 5, name="net")
    assert set_recomputed(net, name="net") == 4
