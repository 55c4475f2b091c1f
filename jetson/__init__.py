"""Boards: facts, preflight, power, set-up and robot adapters. May import `sinkprune`, its runtime and engines."""
