"""Where the checkout is, for tests that read its files or start processes in it."""

from pathlib import Path

import yaml

from baoc.config.from_hydra import from_plain
from baoc.config.schema import RunConfig

ROOT = Path(__file__).resolve().parents[2]


def read_config(path: Path) -> RunConfig:
    """What `write_config` wrote."""
    return from_plain(yaml.safe_load(path.read_text(encoding="utf-8")))
