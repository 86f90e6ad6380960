"""Values that all decisions use, free of torch: the catalogue with its rules' tags, blocks, and budgets."""
