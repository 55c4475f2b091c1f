"""Files, arrays and clips as RGB frames."""
