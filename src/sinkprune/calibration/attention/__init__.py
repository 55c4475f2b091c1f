"""Where text looks: the sink tokens that survive pruning, and the entropy of the text's attention at prune layers."""
