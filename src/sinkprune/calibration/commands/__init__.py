"""The commands that measure a model: `sinkprune-calibrate` and `sinkprune-evaluate`."""
