"""Imported once by the server that trials are forked from: what every run needs. Starts no thread and no CUDA."""

from baoc import data, train
from baoc.config import cli

__all__ = ["cli", "data", "train"]
