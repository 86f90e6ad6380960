"""Imported once by the server that trials are forked from: what every run needs. Starts no thread and no CUDA.

Composing once fills what a first composing fills: Hydra's plugins, its grammar's tables, the nodes of experiments/ and
sweeps/. Trials inherit all of it, and then compose in half the time.
"""

from baoc import data
from baoc.cli import main as cli
from baoc.config.compose import compose
from baoc.training import run as train

__all__ = ["cli", "data", "train"]

compose(["model=vit", "budget=state_12.5", "allocator=exact", "risk.weights.drop_m=1.5e-3", "blocks.patterns=[]"])
