"""Update matching: one learning rate serves every rule when each block's update is as large as AdamW's would be.

`RuleInfo.matched` says which rules are matched. A rule that divides averaged gradients by the root of averaged squares,
of its own element or shared by row, column or both, has AdamW's size by itself in every phase of training and is not
matched. Updates of all others are scaled.

factor = target / own RMS, where own is what the rule's update measured over the block in the step before (no second
pass); before a block's first step and after a migration it is measured exactly. A jump of the rule's RMS would pass
that lag unchecked, so no tensor's update exceeds an RMS of one learning rate, AdamW's own first step.

Averaging gradients removes noise and leaves the way that they go together. So a rule without momentum that is scaled
to the RMS of AdamW's averaged update goes a fraction of AdamW's way. `displacement`, the default, scales it to AdamW's
update without the average instead, whose RMS is 1 because v is the mean of g^2; `rms` scales it to AdamW's own.

The arithmetic is in `baoc.optim.backends.eager`: `update_norm`, `factor` and `Measure`.
"""

from typing import Literal

from baoc.types import RuleInfo, StateKind

Matching = Literal["rms", "displacement"]
MATCHINGS: tuple[Matching, ...] = ("rms", "displacement")
DEFAULT_TARGET = 0.2  # AdamW's usual update RMS, before any profile
UNAVERAGED_TARGET = 1.0  # and that of g / sqrt(v)


def has_momentum(rule: RuleInfo) -> bool:
    """Whether the rule keeps momentum."""
    return any(decl.kind is StateKind.M for decl in rule.states)
