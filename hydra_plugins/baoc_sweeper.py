"""Hydra's door to BAOC's studies: it finds sweepers in `hydra_plugins` only, and imports them at every start.

So nothing heavy is imported here, and annotations stay real objects (hydra 1.3.8 breaks on postponed ones).
"""

from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from baoc.sweep.study_config import StudyConfig, read_study


class BaocSweeper(Sweeper):
    """Runs `hydra.sweeper` as an Optuna study of processes; see `baoc.sweep.study` and `baoc.sweep.launch`."""

    def __init__(self, **_: Any) -> None:
        self.config: DictConfig | None = None
        self.hydra_context: HydraContext | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.hydra_context = config, hydra_context

    def sweep(self, arguments: list[str]) -> Any:
        from baoc.config.nodes import as_typed
        from baoc.frontier.runs import STUDY_FILE
        from baoc.sweep.launch import launch_workers
        from baoc.sweep.space_check import check_space
        from baoc.sweep.study import add_overrides, raise_if_all_failed, run_study

        assert self.config is not None and self.hydra_context is not None
        study = read_study(OmegaConf.to_container(self.config.hydra.sweeper, resolve=True))
        folder = self.config.hydra.sweep.dir
        if not (Path(folder) / STUDY_FILE).is_file():  # what goes on began with the same space
            check_space(add_overrides(study, arguments), compose=self._compose)
        if self.config.hydra.launcher._target_.endswith(".BasicLauncher"):
            done = run_study(study, folder=folder, extra=as_typed(arguments))
            raise_if_all_failed(done)
            return done
        return launch_workers(study, config=self.config, context=self.hydra_context, extra=arguments)

    def _compose(self, words: list[str]) -> DictConfig:
        """What a run of these overrides would be; Hydra composes one application at a time, and this one runs."""
        from baoc.config.nodes import register

        assert self.config is not None and self.hydra_context is not None
        register(words)
        trial = self.config.copy()
        with read_write(trial), open_dict(trial):
            trial.hydra.overrides.hydra = []  # those of the study, which trials do not get
        composed = self.hydra_context.config_loader.load_sweep_config(trial, words)
        with read_write(composed), open_dict(composed):
            composed.pop("hydra")
        return composed


def _plain(item: Field[Any]) -> Any:
    """The default of a setting as a file writes it."""
    value = item.default_factory() if item.default_factory is not MISSING else item.default
    return {} if is_dataclass(value) else [] if value == () else value


# All that a study may be told beside what its file must say, so that hydra.sweeper.KEY=VALUE works for each
SETTINGS = {item.name: _plain(item) for item in fields(StudyConfig) if item.name not in ("name", "objectives", "space")}
ConfigStore.instance().store(
    group="hydra/sweeper",
    name="baoc",
    node={"_target_": "hydra_plugins.baoc_sweeper.BaocSweeper", **SETTINGS},
    provider="baoc",
)
