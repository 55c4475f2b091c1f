"""Measures budgets: times, memory, joules, and requests at a camera's rate."""
