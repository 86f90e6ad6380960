"""Imported once by the fork server of trials: what every run needs. Starts no thread and no CUDA.

Composing once fills Hydra's caches (plugins, grammar tables, nodes of experiments/ and sweeps/). Trials inherit them
and compose in half the time.
"""

from baoc import data
from baoc.cli import main as cli
from baoc.cli.fast_import import import_torchmetrics
from baoc.config.compose import compose

import_torchmetrics()  # before Lightning, which imports it more slowly

from baoc.training import run as train  # noqa: E402

__all__ = ["cli", "data", "train"]

compose(["model=vit", "budget=state_12.5", "allocator=exact", "risk.weights.drop_m=1.5e-3", "blocks.patterns=[]"])
