"""A file of a user's own: a network, a task and data, and what goes wrong in such."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width: int, num_classes: int):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, num_classes))

    def forward(self, x):
        return self.body(x)


def build(num_classes, width=16, act=None):
    net = Net(width, num_classes)
    if act is not None:
        net.body[2] = act
    return net


def loss(model, batch, scale=1.0):
    logits = model(batch["images"])
    return {"loss": scale * nn.functional.cross_entropy(logits, batch["labels"]), "scale": scale}


def data(n=60, path=None):
    x = torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = (x.sum((1, 2, 3)) > 0).long()
    return {"images": x[: n // 2], "labels": y[: n // 2]}, {"images": x[n // 2 :], "labels": y[n // 2 :]}


def pairs(n=40):
    x = torch.randn(n, 5)
    return [(row, int(row.sum() > 0)) for row in x[: n // 2]], [(row, 0) for row in x[n // 2 :]], {"num_classes": 2}


class Lacking(nn.Module):
    """Asks itself for an attribute that it does not have."""

    def __init__(self, num_classes):
        super().__init__()
        self.layer = nn.Linear(64, num_classes)

    def forward(self, x):
        return self.layer(x.flatten(1)) * self.gain


class Unlike(Lacking):
    """Returns what no task takes."""

    def forward(self, x):
        return [self.layer(x.flatten(1))]


class Wide(Lacking):
    def forward(self, x):
        return self.layer(x)


def raises(num_classes):
    return {}["no such key"]


def number(num_classes):
    return 3


def empty(num_classes):
    return nn.Flatten()


def reads(num_classes):
    net = Net(8, num_classes)
    net.body[1].weight.sum().item()
    return net


def one(n=3):
    return 3


def ragged():
    return [(torch.zeros(n + 1), 0) for n in range(20)], [(torch.zeros(1), 0)]


def words():
    return [{"text": "a"}] * 20, [{"text": "a"}]


def no_loss(model, batch):
    return model(batch["images"])


def detached(model, batch):
    return torch.zeros(())


class NoTask:
    pass


VALUE = 3


def nothing():
    empty = {"images": torch.ones(0, 1, 8, 8), "labels": torch.ones(0, dtype=torch.int64)}
    return empty, empty
