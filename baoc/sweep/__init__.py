"""Several runs as one thing: for now the frontier of a multirun; the Optuna sweeper comes here."""

from baoc.sweep.frontier import SweepFrontier, frontier_of, report

__all__ = ["SweepFrontier", "frontier_of", "report"]
