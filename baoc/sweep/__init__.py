"""Studies: Optuna chooses settings, each trial trains in its own process, the storage keeps every result."""
