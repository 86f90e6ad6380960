"""Decides reallocations during training, free of torch; `baoc.training.reallocator` carries them out.

`migration_cost`: the peak memory of a migration. `budget_schedule`: the budget in force at a step. `late_params`: specs
of parameters that come after the plan. `conversion`: the plan to resume with from a checkpoint of another plan.
"""
