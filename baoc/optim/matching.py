"""Update matching: one learning rate serves every rule if each block's update is as large as AdamW's would be.

`RuleInfo.matched` says which rules are matched. A rule that divides averaged gradients by the root of averaged squares
(per element, or shared by row, column or both) has AdamW's size by itself in every phase of training, and is not
matched. Updates of all others are scaled.

factor = target / own RMS. The own RMS is that of the block's update in the step before, so no second pass is needed;
before a block's first step and after a migration it is measured exactly. A sudden rise of the rule's RMS would be
noticed one step late, so no tensor's update exceeds an RMS of one learning rate, AdamW's own first step.

Averaging gradients removes noise and keeps their common direction. So a rule without momentum whose updates have the
RMS of AdamW's averaged update would move a fraction of AdamW's distance. `displacement`, the default, scales it to
AdamW's update without the average instead, whose RMS is 1 because v is the mean of g^2; `rms` scales it to AdamW's own.

The arithmetic: `update_norm`, `factor` and `UpdateSize` in `baoc.optim.backends.eager`; for the fused backend
`baoc.kernels.triton.matching` and `matched_factor` in `baoc.kernels.triton.elementwise`.
"""

from typing import Literal

from baoc.types import RuleInfo, StateKind

Matching = Literal["rms", "displacement"]
MATCHINGS: tuple[Matching, ...] = ("rms", "displacement")
DEFAULT_TARGET = 0.2  # AdamW's usual update RMS, before any profile
UNAVERAGED_TARGET = 1.0  # and that of g / sqrt(v)


def has_momentum(rule: RuleInfo) -> bool:
    return any(decl.kind is StateKind.M for decl in rule.states)
