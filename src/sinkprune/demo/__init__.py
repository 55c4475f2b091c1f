"""The demonstration: a small model, a real photo, and what pruning does to it."""
