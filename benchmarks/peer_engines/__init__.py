"""The parts of `benchmarks/peers.py`: the checkpoint, a module and a process for each engine, rounds, reports."""
