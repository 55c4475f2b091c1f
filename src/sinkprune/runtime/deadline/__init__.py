"""Answers in time: costs measured, budgets chosen."""
