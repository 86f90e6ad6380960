"""What a reallocation during training is decided by, free of torch; `baoc.training.reallocator` carries it out.

`move_cost`: the memory of a move. `budget_schedule`: which budget is in force. `late_params`: specs of parameters that
come after the plan. `conversion`: what counts of a checkpoint made under another plan.
"""
