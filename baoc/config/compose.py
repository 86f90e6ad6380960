"""Composes a run from overrides without a command line, for tests, trial processes and notebooks."""

from collections.abc import Sequence

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import DictConfig

from baoc.config import assets
from baoc.config.nodes import register, with_option_names

VERSION_BASE = "1.3"


def compose(overrides: Sequence[str] = ()) -> DictConfig:
    """Composes the configuration of `python run.py OVERRIDES`.

    Raises Hydra's errors, which `baoc.cli.hydra_errors` translates.
    """
    register(overrides)
    with initialize_config_dir(config_dir=str(assets.conf()), version_base=VERSION_BASE, job_name="baoc"):
        return hydra_compose(config_name="config", overrides=with_option_names(overrides))
