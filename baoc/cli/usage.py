"""`--help`: how to start a run, every group with its options, and every composed value.

Hydra's own help reads all of conf/ again for each group, which takes most of a second.
"""

from collections.abc import Sequence

from omegaconf import OmegaConf

from baoc.cli.listing import LISTS
from baoc.config import assets
from baoc.config.compose import compose
from baoc.config.nodes import COLLECTIONS, option_names

_HEAD = """\
BAOC gives every block of a network the cheapest optimizer it can safely use, inside a memory and time budget.

  python run.py model=vit budget=8gb                    train inside 8 GiB
  python run.py -m budget=state_50,state_25,state_10    one run per budget, then the frontier
  python run.py budget=7.5gb mode=plan                  the plan alone: will it fit, what will it cost
  python run.py mode=race budget=state_25               recipes that fit, tried on short paired runs
  python run.py experiments=NAME                        a named experiment, exactly as recorded
  python run.py --list NAME                             what there is; NAME is one of
                                                        {lists}

budget= takes a preset, any size (7.5gb, 300mb; 8gb is 8 GiB) or state_N, N % of fp32 AdamW's optimizer state.
recipe= takes a recipe by name (--list recipes) or a FILE.yaml; recipe.mlp=SPEC changes it for a role.
budget.step_time=1.2 beside it bounds a step to 1.2 times one with torch's fused AdamW."""

_TAIL = """\
-m runs every combination of values with commas; --cfg job shows a configuration without running it; --hydra-help
lists Hydra's own flags, such as --shell-completion. Exit codes: 0 done, 2 bad input, 3 infeasible budget,
4 budget breached or out of memory, 5 training failed, 130 interrupted, 1 a bug. The environment variable BAOC_CACHE is
the folder for what is kept between runs, instead of the user's cache: tokens, measured seconds, the CPU's library."""


def help_text(overrides: Sequence[str]) -> str:
    """The text of `--help`, with the values that `overrides` compose. Raises Hydra's errors."""
    composed = OmegaConf.to_yaml(compose(overrides))
    folders = sorted(folder.name for folder in assets.conf().iterdir() if folder.is_dir() and folder.name != "hydra")
    groups = [*folders, *COLLECTIONS]
    return "\n".join(
        [
            _HEAD.format(lists=" ".join(LISTS)),
            "\n== Groups (group=option) ==",
            *(f"{group}: {', '.join(option_names(group)) or '(none yet)'}" for group in groups),
            "\n== Values (group.key=value) ==",
            composed,
            _TAIL,
        ]
    )
