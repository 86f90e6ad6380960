"""From described parameters and a budget to a plan, free of torch: cost, risk, candidates, allocators, `Planner`."""
