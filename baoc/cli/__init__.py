"""The command `python run.py ...`: lists, help, error messages, jobs of a multirun, exit codes, the run lock."""
