"""Whether the settings that a study searches are settings of a run: a mistyped key is told at once, and not after the
hours that its baselines train."""

from collections.abc import Callable, Sequence
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from baoc.cli.problems import explain
from baoc.config.from_hydra import from_hydra
from baoc.errors import BadInputError
from baoc.sweep.study_config import Param, StudyConfig

MOST_POINTS = 24  # of a space that are composed


def refuse_unknown_settings(config: StudyConfig, *, compose: Callable[[list[str]], DictConfig]) -> None:
    """Composes baselines, and points of the space until each choice (of very many an even sample) was in one.

    Raises BadInputError, which names the point, where one is no run.
    """
    found = points(config.space)
    every = -(-len(found) // MOST_POINTS) or 1  # a quarter of a second each
    first = config.repeats[0] if config.repeats else ()
    shown = [*found[: len(found) - 1 : every], found[-1]]
    tried = [([*words, *first], "hydra.sweeper.space") for words in shown]
    tried += [([*found[0], *own], "hydra.sweeper.repeats") for own in config.repeats[1:]]
    tried += [([*words, *first], "hydra.sweeper.baselines") for words in config.baselines]
    for words, key in tried:
        try:
            from_hydra(compose([*config.fixed, *words]))
        except (HydraException, OmegaConfBaseException, BadInputError) as error:
            told = error if isinstance(error, BadInputError) else explain(error)
            raise BadInputError(
                f"study {config.name} would try {' '.join(words)}, which is no run: {told or error}\n"
                f"correct {key} (or hydra.sweeper.fixed, which comes before it)"
            ) from error


def points(space: Sequence[Param]) -> list[list[str]]:
    """Overrides of the first point (of ranges the lower end), and of one more for every further choice; what does not
    matter beside the others is left out."""
    drawn = {param.key: param.choices or (param.low,) for param in space}
    firsts = {key: values[0] for key, values in drawn.items()}
    gates: dict[str, dict[str, Any]] = {}  # what has to be chosen for a setting to matter, gates of gates included
    for param in space:
        own = {key: next((v for v in values if v in drawn[key]), values[0]) for key, values in param.when.items()}
        gates[param.key] = {key: value for gate in own for key, value in gates[gate].items()} | own
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
