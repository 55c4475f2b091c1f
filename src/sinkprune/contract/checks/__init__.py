"""Checks of values that users give, and how values appear in messages."""
