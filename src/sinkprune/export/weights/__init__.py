"""The forms of weights: float, rounded, and as a checkpoint quantised them."""
