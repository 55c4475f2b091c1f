"""transformers' image processors, on Pillow and numpy alone."""
