"""Finds budgets that meet a deadline on a machine, from measured costs and the attention that budgets drop."""
