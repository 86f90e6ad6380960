"""The command `python run.py ...`: listings, error messages, jobs of a multirun, exit codes, the run lock."""
