"""The networks as graphs: vision towers and decoders."""
