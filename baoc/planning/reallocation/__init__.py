"""What a reallocation during training is decided by, free of torch; `baoc.training.reallocator` carries it out.

`move_cost`: what a move costs in risk and in bytes. `budget_schedule`: which budget is in force. `relaxation`: which
calm blocks give up state. `late_params`: specs of parameters that come after the plan. `conversion`: what counts of a
checkpoint made under another plan. When to plan again is said by `baoc.training.triggers`.
"""
