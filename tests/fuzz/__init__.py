"""Runs the commands on many wrong inputs: `make fuzz`."""
