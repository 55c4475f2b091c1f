"""Small checkpoints, bundles, graphs and videos that tests make."""
