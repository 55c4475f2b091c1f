"""What `benchmarks/peers.py` is made of: a checkpoint, one module an engine, a process for each, rounds, reports."""
