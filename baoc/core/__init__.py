"""The torch-free core of all decisions: catalogue, tags of rules, recipes, blocks, budgets and statistics."""
