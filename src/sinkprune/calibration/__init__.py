"""Measuring a model to pick its numbers: norms, schedules, quantisation. May import everything else."""
