"""What recipe_study.py compares and how it trains: lists and settings that were fixed before its first run."""

# Recipe -> spec of hidden matrices, of embedding and head; norms and other vectors run fp32 AdamW.
# A number is a state fraction that the planner meets: risk=prior, allocator=exact.
RECIPES: dict[str, tuple[str, str] | float] = {
    "adamw": ("adamw", "adamw"),
    "adamw8": ("adamw_int8", "adamw_int8"),
    "foam8_lean": ("foam_l2_int8", "adamw_int8"),
    "muon8_lean": ("muon_int8", "adamw_int8"),
    "afm8_lean": ("adafactor_momentum_int8", "adafactor_momentum_int8"),
    "planned10": 0.10,
}
BETA2 = (0.999, 0.95)
BASE_LR = 2e-3
FACTORS = (1.0, 0.5, 2.0, 0.25, 4.0)  # in the order of running
SEEDS = {"short": (100, 101, 102), "long": (200, 201, 202)}  # long runs choose nothing on seeds that chose their rates
LONGER = 10
BETA1, WEIGHT_DECAY, CLIP, WARMUP, FLOOR = 0.9, 1e-2, 1.0, 0.1, 0.1
MATCHING = "displacement"
CHECKED, TIMED, TOLERANCE = 20, 40, 0.02  # steps; relative difference of losses
