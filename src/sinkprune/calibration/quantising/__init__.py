"""Quantised weights for a bundle of floats, rounded for the pictures and prompts of its user."""
