"""Answers of closed lists at larger and larger budgets, until they are sure enough."""
