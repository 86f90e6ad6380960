"""Lightning callbacks: measurements, checkpoints, progress, signals, divergence, changes of the budget.

Order in `Trainer(callbacks=)`: RngState, StepVote, StepMonitor, MemoryMonitor, the rest, progress bar. Lightning moves
SafeCheckpoint to the end.
"""
