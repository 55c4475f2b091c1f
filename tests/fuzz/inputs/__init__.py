"""Wrong inputs: where they come from, and how they are changed."""
