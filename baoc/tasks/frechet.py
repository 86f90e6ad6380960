"""Frechet distance between two sets of digits, on features of a small classifier that is part of the package.

Heusel et al. 2017 use Inception's features, which need a download and 299 x 299 photographs. Features of a random
network need no file, but separate digits from flipped or blended ones four times less clearly. Use the distances to
compare runs on the embedded digits; they are not FID and not comparable to published values.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

FILE = Path(__file__).with_name("digits_features.npz")  # made by experiments/benchmarks/digits_features.py


class FeatureNet:
    """Images (N, 1, 8, 8) in [-1, 1] -> features (N, 32) of a classifier: three convolutions and a linear layer."""

    SHAPES: ClassVar[dict[str, tuple[int, ...]]] = {
        "conv1": (8, 1, 3, 3),
        "conv2": (16, 8, 3, 3),
        "conv3": (32, 16, 3, 3),
        "hidden": (32, 128),
        "bias": (32,),
        "head": (10, 32),
    }

    def __init__(self, weights: Mapping[str, Tensor]):
        self.weights = weights

    @classmethod
    def load(cls) -> "FeatureNet":
        with np.load(FILE) as arrays:
            return cls({name: torch.from_numpy(arrays[name]).float() for name in cls.SHAPES})

    def __call__(self, images: Tensor) -> Tensor:
        features = images.float()
        for name, stride in (("conv1", 1), ("conv2", 2), ("conv3", 2)):
            features = F.relu(F.conv2d(features, self.weights[name], stride=stride, padding=1))
        return F.relu(F.linear(features.flatten(1), self.weights["hidden"], self.weights["bias"]))

    def classify(self, images: Tensor) -> Tensor:
        """Logits (N, 10): what the features were trained for."""
        return F.linear(self(images), self.weights["head"])


@torch.no_grad()
def frechet_distance(images: Tensor, reference: Tensor) -> float:
    """Between two sets of images (N, 1, 8, 8) in [-1, 1] on the CPU, in units of the reference's own features.

    |m_1 - m_2|^2 + tr(C_1 + C_2 - 2 (C_1 C_2)^(1/2)) with means and covariances of features, each divided by its
    deviation over the reference. Biased upwards by few images: compare at equal numbers. NaN if any image is.
    """
    if not images.isfinite().all():
        return float("nan")
    net = FeatureNet.load()
    features, real = net(images).double(), net(reference).double()
    scale = real.std(0)
    used = scale > 1e-6  # a ReLU that is never active carries no information
    one, other = features[:, used] / scale[used], real[:, used] / scale[used]
    first, second = torch.cov(one.T), torch.cov(other.T)
    values, vectors = torch.linalg.eigh(first)
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    cross = torch.linalg.eigvalsh(root @ second @ root).clamp_min(0).sqrt().sum()
    means = (one.mean(0) - other.mean(0)).square().sum()
    return float(means + first.trace() + second.trace() - 2 * cross)
