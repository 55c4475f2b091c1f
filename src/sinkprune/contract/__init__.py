"""What every other part is written against: manifests, budgets, errors, FLOP counts, reports. Standard library and
numpy only."""
