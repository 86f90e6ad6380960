"""The command `python run.py ...`: listings, refusals, jobs of a multirun, exit codes, one process per folder."""
