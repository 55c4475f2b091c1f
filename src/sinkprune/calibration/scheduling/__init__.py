"""Budgets for a machine: what fits a time, found by what its parts cost and what attention it drops."""
