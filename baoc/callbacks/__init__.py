"""Lightning callbacks that do not depend on a plan: measurements, checkpoints, progress, signals, divergence.

Order in `Trainer(callbacks=)`: RngState, StepVote, StepMonitor, MemoryMonitor, the rest, progress bar. Lightning moves
SafeCheckpoint to the end.
"""
