"""The forms of weights: floats, rounded at export, and quantised by the checkpoint."""
