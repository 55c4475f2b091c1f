"""Measuring a model to pick its numbers: norms, attention, quantisation. May import everything else."""
