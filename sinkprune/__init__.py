"""sinkprune: visual token pruning inside the decoder of multimodal LLMs, on exported engines.

This package is the contract every other part is written against: the bundle manifest, budgets, errors, FLOP
counts and the profile report. It needs the standard library and numpy only.
"""

__version__ = "0.1.0"
