"""Pareto frontiers of finished runs: tables, the HTML page, and a W&B run."""
