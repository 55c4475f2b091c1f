"""Finding the thresholds of methods whose counts vary by picture."""
