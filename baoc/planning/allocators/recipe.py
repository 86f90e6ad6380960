"""`allocator=recipe`: each block runs the recipe's spec for its role, or a fallback if that does not apply."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baoc.core.catalogue import SPECS
from baoc.core.recipes import FALLBACK, RECIPES, Recipe
from baoc.core.rule_tags import RULE_INFOS
from baoc.planning.allocators.base import BASELINE, AllocatorTraits, allocate_first_wanted
from baoc.planning.candidates import why_inapplicable
from baoc.planning.cost import state_bytes
from baoc.types import Allocation, Block, Candidate, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """A block's spec under a recipe.

    Args:
        role: the recipe's key that decides for the block.
        spec: the spec that the block runs.
        preferred: the recipe's spec under that key.
        why_not: why `preferred` does not apply; empty if it does.
    """

    role: str
    spec: str
    preferred: str
    why_not: str = ""

    @property
    def text(self) -> str:
        if not self.why_not:
            return f"the recipe's spec for {self.role}"
        return f"falls back: the recipe asks {self.preferred} of {self.role}, but {self.why_not}"


def pick_spec(block: Block, *, recipe: Recipe) -> Pick:
    """The first of the recipe's specs for the block that applies to it; the last one, fp32 AdamW, always does."""
    role, preferred = recipe.preferred_spec(block)
    why_not = {
        name: why_inapplicable(block, spec=SPECS[name], rule=RULE_INFOS[SPECS[name].rule])
        for name in recipe.specs_in_order(block)
    }
    spec = next(name for name, why in why_not.items() if why is None)
    return Pick(role=role, spec=spec, preferred=preferred, why_not=why_not[preferred] or "")


def recipe_bytes(blocks: Sequence[Block], *, recipe: Recipe) -> int:
    """State bytes of a recipe on these blocks, on the device and on the host."""
    specs = {block.name: SPECS[pick_spec(block, recipe=recipe).spec] for block in blocks}
    return sum(state_bytes(block, spec=specs[block.name], rule=RULE_INFOS[specs[block.name].rule]) for block in blocks)


def recipes_within(blocks: Sequence[Block], *, by_part: Sequence[Block], state_bytes: int) -> list[tuple[str, int]]:
    """(name, bytes) of RECIPES that keep at most `state_bytes` of state on a network's blocks, the largest first.

    `by_part`: the same network's blocks as recipes that name parts of attention or mlp have them.
    """
    sizes = [
        (name, recipe_bytes(by_part if recipe.needs_part_blocks else blocks, recipe=recipe))
        for name, recipe in RECIPES.items()
    ]
    return sorted(((name, size) for name, size in sizes if size <= state_bytes), key=lambda entry: -entry[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeAllocator:
    """Runs the `picks` by block. A block without one runs fp32 AdamW, or else its candidate of least risk. Raises
    NoFeasibleAllocation, with the recipe's totals, as nothing is left to choose."""

    name: str = "recipe"
    description: str = "what recipe=NAME asks of each role"
    picks: Mapping[str, Pick] = field(default_factory=dict[str, Pick])
    traits: AllocatorTraits = BASELINE

    def __call__(self, candidates: Mapping[str, Sequence[Candidate]], *, limits: Limits, seed: int = 0) -> Allocation:
        picks = {block: pick.spec for block, pick in self.picks.items()}
        return allocate_first_wanted(
            candidates,
            limits=limits,
            allocator=self.name,
            wanted=lambda options: (picks.get(options[0].block, FALLBACK),),
        )
