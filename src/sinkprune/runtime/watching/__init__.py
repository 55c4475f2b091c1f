"""Questions about an endless camera: which rows of its frames are kept, and what the LLM answers."""
