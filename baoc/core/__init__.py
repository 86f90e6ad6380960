"""What the rest decides with, free of torch: the catalogue with its rules' tags, blocks, and budgets."""
