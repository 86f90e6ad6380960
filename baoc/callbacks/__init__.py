"""Lightning callbacks that know no plan: what a run measures, what it keeps, what it shows, how it ends.

Order in `Trainer(callbacks=)`: RngState, StepVote, StepMonitor, MemoryMonitor, the rest, progress bar; Lightning puts
SafeCheckpoint last by itself.
"""
