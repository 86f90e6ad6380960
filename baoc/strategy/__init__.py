"""BaocStrategy: any LightningModule under a budget, with its own optimizer's groups, schedule and loaders kept."""

from baoc.strategy.strategy import BaocStrategy

__all__ = ["BaocStrategy"]
