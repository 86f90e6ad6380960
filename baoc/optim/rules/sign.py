"""Rules whose every coordinate moves by the same amount: Lion, Signum, and the sign of the gradient alone.

None counts steps: the sign of an average does not depend on its bias. sign(0) = 0, so idle coordinates stay.
"""

from torch import Tensor

from baoc.core.rule_tags import RULE_INFOS
from baoc.optim.rules.base import Direction, Rule, RuleContext

# Lion's second beta is the decay of m, .99 in its paper. A group's betas[1] is AdamW's decay of v, .999 by default, at
# which m would lag a thousand steps behind; so it is used only if it is the shorter one.
LION_DECAY = 0.99


class Lion(Rule):
    """Lion (Chen et al. 2023): sign(beta1 m + (1 - beta1) g), then m averages g with the slower decay."""

    def direction(self, grad: Tensor, *, states: dict[str, Tensor], ctx: RuleContext) -> Direction:
        m = states["m"]
        update = m.lerp(grad, 1 - ctx.beta1).sign_()
        m.lerp_(grad, 1 - min(ctx.beta2, LION_DECAY))
        return Direction(numerator=update)


class Signum(Rule):
    """Signum (Bernstein et al. 2018): the sign of the average of g with decay beta1."""

    def direction(self, grad: Tensor, *, states: dict[str, Tensor], ctx: RuleContext) -> Direction:
        return Direction(numerator=states["m"].lerp_(grad, 1 - ctx.beta1).sign())


class Sign(Rule):
    """The sign of the gradient; keeps nothing."""

    def direction(self, grad: Tensor, *, states: dict[str, Tensor], ctx: RuleContext) -> Direction:
        return Direction(numerator=grad.sign())


RULES = (Lion(RULE_INFOS["lion"]), Signum(RULE_INFOS["signum"]), Sign(RULE_INFOS["sign"]))
