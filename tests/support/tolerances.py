"""The one table of tolerances, by (what is computed, how its states are stored), each with its origin.

rtol and atol are of single numbers; `cosine` is the least cosine, `nmse` the largest squared error over squared size.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    origin: str
    rtol: float = 0.0
    atol: float = 0.0
    cosine: float = 1.0
    nmse: float = 0.0


# A rule's fp32 arithmetic against an fp64 reference, after tens of steps. One step rounds about ten times (6e-8 each);
# a quotient near a zero of m adds an absolute error of that size times the update's scale, about 1.
FP32_RULE = Tolerance(origin="ten roundings of 2^-24 per step, over tens of steps", rtol=2e-5, atol=2e-6)

# The same after hundreds of steps: each rounds a weight between 2 and 4 by up to 2^-23, 200 of them one way by 2.4e-5.
FP32_RULE_LONG = Tolerance(origin="200 roundings of a weight, one way at worst", rtol=1e-4, atol=2e-5)

# Muon's products in bf16 against fp32, of matrices whose singular values lie within two decades: measured .022 to .043.
MUON_FP16 = Tolerance(
    origin="18 products with 11 significant bits, singular values down to 0", cosine=0.9998, nmse=0.02**2
)
MUON_BF16 = Tolerance(origin="15 products with 8 significant bits", cosine=0.998, nmse=0.05**2)

# One encoding to nearest: half a step at the codec's coarsest.
CODEC_NEAREST = {
    "fp32": Tolerance(origin="stored as it is"),
    "bf16": Tolerance(origin="8 significant bits: half of 2^-7 relative", rtol=2**-8, nmse=2**-17),
    # y = q/127 is off by 1/254; dx/dy = 2/(2-|y|)^2 <= 2, so x is off by at most 2/254 of the largest in the group.
    "softsign8": Tolerance(origin="half a code of 1/127, slope at most 2", atol=2.05 / 254, nmse=6e-5),
    # s is off by 1/510 of the largest in the group, and never below 1/255 of it, so v by 2 s (1/510) + (1/255)^2.
    "sqrt8": Tolerance(origin="half a code of 1/255 in sqrt(v)", atol=1.05 / 255, nmse=2e-5),
    # |x| = (q/127)^4 is off by 4 |x|^(3/4) / 254 at most, and v = s^2 by twice 4/510
    "root8m": Tolerance(origin="half a code of 1/127 in the fourth root", atol=4.1 / 254, nmse=2e-4),
    "root8v": Tolerance(origin="half a code of 1/255 in the fourth root of sqrt(v)", atol=8.2 / 510, nmse=2e-4),
    # squares of q/7: the widest gap is 13/49 of the largest in the group; what is below 1/98 becomes zero
    "root4": Tolerance(origin="half the gap from 6^2 to 7^2, of 49", atol=6.6 / 49, nmse=2e-2),
}

# Update RMS of the first step after a migration over that of the last one before it, on gradients mostly of noise. A
# matched block's first update is measured exactly before it is applied, so what is left is how far the source's own
# last update was from its target. AdamW has no factor: a new m starts at (1 - b1) of the gradient instead of its usual
# sqrt((1 - b1) / (1 + b1)), .44 at b1 = .9, and m over a v of lower rank is up to 1.2 times larger.
CONTINUITY_MATCHED = Tolerance(origin="RMS of the source's last step against its target", rtol=0.1)
CONTINUITY_ADAMW = Tolerance(origin="a new m starts at .44 of its usual size", rtol=0.6)
