"""Do sink tokens survive, and how sharply does the text look at what is left? Measured where layers prune."""
