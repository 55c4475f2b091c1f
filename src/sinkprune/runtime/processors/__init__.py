"""Image processors of transformers, with Pillow and numpy only."""
