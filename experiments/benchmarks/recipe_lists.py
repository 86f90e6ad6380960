"""What role_study.py compares and how it trains: lists and settings that were fixed before their first run.

Those of phases `attention` and `queries` were written when `again` had been seen, and run on seeds that it had not.
"""

BETA1, WEIGHT_DECAY, CLIP, WARMUP, FLOOR = 0.9, 1e-2, 1.0, 0.1, 0.1
MATCHING = "displacement"
ROLE_STEPS = 1000  # of each task; 1.7, 2.5 and 1.25 times the product's own for these networks
LONG_STEPS = 8000
ROLE_LRS = {"language": 3e-3, "vision": 3e-3, "diffusion": 1e-2}  # the product's own, of which factors are multiples
ROLE_SEEDS = {
    "rates": (300, 301), "roles": (310, 311), "long": tuple(range(320, 328)), "confirm": tuple(range(400, 408)),
    "again": (330, 331, 332, 333), "attention": (340, 341, 342, 343),
    "queries": (350, 351, 352, 353),
}  # fmt: skip
ROLE_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
ROLE_BASE = "muon8_lean"  # at its best factor of phase `rates` (least mean of `choice`), by task

# Recipes of phase `rates`: rows of baoc.core.recipes, and these. A number is the beta2 of rules without betas of their
# own.
WHOLE: tuple[str, ...] = (
    "adamw", "adamw8", "adamw4", "muon", "muon8", "muon8_lean", "muon4_lean", "foam8", "foam8_lean", "adafactor_m8",
    "scale", "scale8", "slimadam8", "lion8", "signum8",
)  # fmt: skip
_HIDDEN_OUTER = {
    "muon8_outer4": ("muon_int8", "adamw_int4"), "muon4_outer8": ("muon_int4", "adamw_int8"),
    "muonbf16_outer4": ("muon_bf16", "adamw_int4"), "foam3_lean": ("foam_l3_int8", "adamw_int8"),
    "foam_lean": ("foam_l2", "adamw_int8"),
}  # fmt: skip
MORE_WHOLE: dict[str, dict[str, object]] = {
    name: {"embedding": outer, "head": outer, "norm": "adamw", "hidden": hidden, "fallback": [outer],
           "betas": {"muon": [0.95, 0.95]}}
    for name, (hidden, outer) in _HIDDEN_OUTER.items()
} | {
    "muon8_scale": {"base": "muon8_lean", "embedding": "column_norm", "head": "column_norm_momentum_int8"},
    "muon4_scale": {"base": "muon4_lean", "embedding": "column_norm", "head": "column_norm_momentum_int8"},
    "muon8_lean_m90": {"base": "muon8_lean", "betas": {"muon": [0.9, 0.95]}},
    "foam8_lean_b95": {"base": "foam8_lean", "betas": {"foam": [0.9, 0.95]}},
    "adamw_b99": {"base": "adamw", "betas": {"adamw": [0.9, 0.99]}},
    "adamw_b95": {"base": "adamw", "betas": {"adamw": [0.9, 0.95]}},
}  # fmt: skip

# Phase `roles`: one role of the base runs another spec, at these multiples of the base's rate.
ROLE_MULTIPLES = (1.0, 0.25)
OUTER_SPECS = (
    "adamw", "adamw_int8", "adamw_int4", "adafactor_momentum_int8", "adafactor", "column_norm",
    "column_norm_momentum_int8", "lion_int8", "foam_l2_int8", "adamw_shared_in_int8",
)  # fmt: skip
HIDDEN_SPECS = (
    "adamw", "adamw_int8", "adamw_int4", "muon", "muon_int8", "muon_int4", "foam_l2_int8", "foam_l3_int8",
    "adafactor_momentum_int8", "adafactor", "column_norm", "lion_int8", "adamw_shared_out_int8",
)  # fmt: skip
ROLE_SPECS: dict[str, tuple[str, ...]] = {
    "embedding": OUTER_SPECS,
    "head": OUTER_SPECS,
    "norm": ("adamw", "adamw_int8", "lion_int8", "sign"),
    "first": ("adamw_int8", "foam_l2_int8", "muon"),
    "hidden": HIDDEN_SPECS,  # of every other role
}
NUM_MIXTURES, MIXTURE_SEED = 12, 2026  # each role draws one of its specs; multiple 1 for Muon's, else one of the two

# Phase `again`, at another size: what good recipes run in a role, at the multiples of phase `roles` (Muon at 1).
_AGAIN_OUTER = ("adamw", "adamw_int4", "adafactor_momentum_int8", "column_norm_momentum_int8")
_AGAIN_HIDDEN = ("adamw_int8", "foam_l2_int8", "muon_int4")
AGAIN_SPECS: dict[str, tuple[str, ...]] = {
    "embedding": _AGAIN_OUTER, "head": _AGAIN_OUTER, "norm": ("adamw_int8",), "hidden": _AGAIN_HIDDEN,
}  # fmt: skip
AGAIN_WHOLE = ("adamw", "adamw8", "muon4_lean", "foam8_lean")  # beside ROLE_BASE, each at its best of phase `rates`
AGAIN_LOW = {
    "adamw": (0.125, 0.0625),
    "adamw8": (0.125, 0.0625),
}  # where the lowest factor of phase `rates` was the best

# Phase `attention`: role -> (spec, multiple) in place of the base's. Listed after phase `again` had found that queries
# and keys are better off with AdamW at a quarter of the rate: is it the rule, or Muon's rate?
ATTENTION: tuple[dict[str, tuple[str, float]], ...] = (
    *({"attention_qk": ("muon_int8", multiple)} for multiple in (0.5, 0.25, 0.125)),
    *({"attention_qk": ("adamw_int8", multiple)} for multiple in (0.5, 0.25, 0.125, 0.0625)),
    *({"attention_qk": ("foam_l2_int8", multiple)} for multiple in (2.0, 1.0, 0.5)),
    *({"attention_qk": ("adamw_int4", multiple)} for multiple in (0.25,)),
    *({"attention_vo": ("muon_int8", multiple)} for multiple in (0.5, 0.25)),
    *({"attention_qk": ("muon_int8", m), "attention_vo": ("muon_int8", m)} for m in (0.5, 0.25)),
    *({"attention_qk": ("adamw_int8", 0.25), "attention_vo": ("muon_int8", multiple)} for multiple in (0.5, 0.25)),
    {"attention_qk": ("adamw_int8", 0.25), "mlp_out": ("foam_l2_int8", 1.0)},
    *({"mlp_in": ("muon_int8", multiple)} for multiple in (0.5, 2.0)),
    *({"mlp_out": ("muon_int8", multiple)} for multiple in (0.5, 2.0)),
)  # fmt: skip

# Phase `queries`, on fresh seeds and at sizes: what `attention` left open, at multiples of the base's rate. Factor of
# the base by size; at 25m its best was not known.
QUERIES: tuple[tuple[str, float], ...] = (
    *(("muon_int8", multiple) for multiple in (1.0, 2.0, 4.0)), *(("foam_l2_int8", m) for m in (1.0, 2.0, 4.0)),
    *(("adamw_int8", multiple) for multiple in (0.25, 0.5)),
)  # fmt: skip
QUERIES_FACTORS: dict[str, tuple[float, ...]] = {"nano": (2.0,), "25m": (0.5, 1.0)}  # 1 of others

# Phase `confirm`, on seeds that chose nothing: AdamW at five rates, and whole recipes at their best of phase `rates`.
CONFIRM_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
CONFIRM_WHOLE = ("adamw_b95", "adamw8", "muon8_lean", "muon8_lean_m90", "muon4_lean", "foam8_lean", "adafactor_m8")
BUDGETS = (10, 15, 25)  # percent of the state; a chosen plan, its permutation and a random feasible plan of each
# Phase `beta2`, on the seeds of `confirm`: AdamW's beta2 at these multiples of the task's rate.
BETA2_WHOLE, BETA2_FACTORS = ("adamw", "adamw_b99", "adamw_b95"), (0.5, 1.0, 2.0)
# Phase `long`: multiples of the best factor of phase `rates`; seeds 320 and 321 had others too (role_table.csv).
LONG_RUNS = {
    "adamw": (1.0, 0.5, 2.0), "adamw_b95": (1.0,), "muon8_lean_m90": (1.0, 0.5), "foam8_lean": (1.0,),
}  # fmt: skip
LONG_BATCHES = (ROLE_SEEDS["long"][:4], ROLE_SEEDS["long"][4:6], ROLE_SEEDS["long"][6:])  # a list each
