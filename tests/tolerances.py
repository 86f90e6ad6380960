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

# One encoding to nearest: half a step at the codec's coarsest.
CODEC_NEAREST = {
    "fp32": Tolerance(origin="stored as it is"),
    "bf16": Tolerance(origin="8 significant bits: half of 2^-7 relative", rtol=2**-8, nmse=2**-17),
    # y = q/127 is off by 1/254; dx/dy = 2/(2-|y|)^2 <= 2, so x is off by at most 2/254 of the largest in the group.
    "softsign8": Tolerance(origin="half a code of 1/127, slope at most 2", atol=2.05 / 254, nmse=6e-5),
    # s is off by 1/510 of the largest in the group, and never below 1/255 of it, so v by 2 s (1/510) + (1/255)^2.
    "sqrt8": Tolerance(origin="half a code of 1/255 in sqrt(v)", atol=1.05 / 255, nmse=2e-5),
    # codes are 2^(16/126) apart in |m|, so half a step is a factor 2^(8/126) = 1.045
    "log8m": Tolerance(origin="half a code of 16 octaves / 126", rtol=2 ** (8 / 126) - 1 + 1e-3, nmse=1e-3),
    # codes are 2^(40/254) apart in v, so half a step is a factor 2^(20/254) = 1.056
    "log8v": Tolerance(origin="half a code of 40 octaves / 254", rtol=2 ** (20 / 254) - 1 + 1e-3, nmse=1.2e-3),
}

# Update RMS just after a migration over just before it, smaller over larger, on gradients that are mostly noise. Where
# the target is matched the first update has exactly the target, which was the last one's RMS over the same block up to
# the sampling of one gradient; where it is AdamW, a new m starts at (1 - beta1) of the gradient instead of its usual
# sqrt((1 - beta1) / (1 + beta1)), a factor .44 at beta1 = .9.
CONTINUITY_MATCHED = Tolerance(origin="one gradient's sampling and the 8-bit codecs", rtol=0.25)
CONTINUITY_NEW_M = Tolerance(
    origin="(1 - b1) against sqrt((1 - b1)/(1 + b1)), and v from its rank-1 moments", rtol=0.65
)
