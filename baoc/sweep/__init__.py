"""A study: Optuna chooses settings, each trial trains each in its own process, the storage keeps every answer."""
