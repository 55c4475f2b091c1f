"""What pruning plans are made of: the graphs before the LLM and between its segments, and how much they keep."""
