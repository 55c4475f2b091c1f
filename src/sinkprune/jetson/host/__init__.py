"""This machine: its board, JetPack, Python, power mode."""
