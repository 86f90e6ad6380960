"""Whether the settings that a study searches are settings of a run: a mistyped key is told at once, and not after the
hours that its baselines train."""

from collections.abc import Callable, Sequence
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from baoc.config.from_hydra import from_hydra
from baoc.config.problems import explain
from baoc.errors import BadInputError
from baoc.sweep.study_config import Param, StudyConfig


def refuse_unknown_settings(config: StudyConfig, *, compose: Callable[[list[str]], DictConfig]) -> None:
    """Composes a few points of the space, until each choice and each range was in one.

    Raises BadInputError, which names the point, where one is no run.
    """
    for words in points(config.space):
        own = [*config.fixed, *words, *(config.repeats[0] if config.repeats else ())]
        try:
            from_hydra(compose(own))
        except (HydraException, OmegaConfBaseException, BadInputError) as error:
            told = error if isinstance(error, BadInputError) else explain(error)
            raise BadInputError(
                f"study {config.name} would try {' '.join(words)}, which is no run: {told or error}\n"
                "correct hydra.sweeper.space (or fixed, which comes before it)"
            ) from error


def points(space: Sequence[Param]) -> list[list[str]]:
    """Overrides of the first point (of ranges the lower end), and of one more for every further choice; what does not
    matter beside the others is left out."""
    firsts = {param.key: (param.choices or (param.low,))[0] for param in space}
    gates = {param.key: {key: values[0] for key, values in param.when.items()} for param in space}
    wanted = [firsts] + [
        firsts | gates[param.key] | {param.key: choice} for param in space for choice in param.choices[1:]
    ]
    wanted += [firsts | gates[param.key] for param in space if not param.matters(firsts)]
    told: list[list[str]] = []
    for values in wanted:
        chosen: dict[str, Any] = {}
        for param in space:
            if param.matters(chosen):
                chosen[param.key] = values[param.key]
        words = [param.override(chosen[param.key]) for param in space if param.key in chosen]
        told += [words] if words not in told else []
    return told
