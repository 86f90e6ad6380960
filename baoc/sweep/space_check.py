"""Checks that every point of a study's space composes to a valid run.

A mistyped key is reported at once, not after the hours that the baselines train.
"""

from collections.abc import Callable, Sequence
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from baoc.cli.hydra_errors import translate_error
from baoc.config.from_hydra import from_hydra
from baoc.errors import BadInputError
from baoc.sweep.study_config import Param, StudyConfig

MAX_POINTS = 24  # of the space; composing one takes 0.25 s


def check_space(config: StudyConfig, *, compose: Callable[[list[str]], DictConfig]) -> None:
    """Composes the baselines, the repeats, and points of the space that cover each choice (of more than MAX_POINTS an
    even sample). Raises BadInputError, which names the point and the key to correct, if one of them is not a valid
    run."""
    points = covering_points(config.space)
    stride = -(-len(points) // MAX_POINTS) or 1
    repeat = config.repeats[0] if config.repeats else ()
    sample = [*points[: len(points) - 1 : stride], points[-1]]
    candidates = [([*words, *repeat], "hydra.sweeper.space") for words in sample]
    candidates += [([*points[0], *words], "hydra.sweeper.repeats") for words in config.repeats[1:]]
    candidates += [([*words, *repeat], "hydra.sweeper.baselines") for words in config.baselines]
    for words, key in candidates:
        try:
            from_hydra(compose([*config.fixed, *words]))
        except (HydraException, OmegaConfBaseException, BadInputError) as error:
            reason = error if isinstance(error, BadInputError) else translate_error(error)
            raise BadInputError(
                f"study {config.name} would try {' '.join(words)}, which is no run: {reason or error}\n"
                f"correct {key} (or hydra.sweeper.fixed, which comes before it)"
            ) from error


def covering_points(space: Sequence[Param]) -> list[list[str]]:
    """Overrides of points that together contain every choice of every setting; of a range the lower end.

    The first point has every first choice. Each further one changes one setting, and others where the setting needs
    them to be active. Inactive settings are left out.
    """
    values_of = {param.key: param.choices or (param.low,) for param in space}
    first = {key: values[0] for key, values in values_of.items()}
    required: dict[str, dict[str, Any]] = {}  # setting -> values of other settings that make it active, transitively
    for param in space:
        direct = {
            key: next((v for v in values if v in values_of[key]), values[0]) for key, values in param.when.items()
        }
        indirect = {key: value for name in direct for key, value in required[name].items()}
        required[param.key] = indirect | direct
    points = [first]
    points += [first | required[param.key] | {param.key: choice} for param in space for choice in param.choices[1:]]
    points += [first | required[param.key] for param in space if not param.is_active(first)]
    covering: list[list[str]] = []
    for point in points:
        active: dict[str, Any] = {}
        overrides: list[str] = []
        for param in space:
            if param.is_active(active):
                active[param.key] = point[param.key]
                overrides.append(param.override(point[param.key]))
        if overrides not in covering:
            covering.append(overrides)
    return covering
