"""What budgets bought: Pareto fronts of finished runs, their tables, the page, and their W&B run."""
