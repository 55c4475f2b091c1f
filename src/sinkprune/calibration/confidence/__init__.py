"""Thresholds of confidence for budget `auto`, found on a user's questions."""
