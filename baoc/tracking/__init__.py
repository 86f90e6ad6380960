"""What a run records and shows: files, metrics, loggers, verified checkpoints, and tables on the terminal.

`files` and `console` need neither torch nor Lightning, so that a plan or a frontier is shown without loading them.
"""
