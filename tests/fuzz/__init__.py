"""Wrong inputs in great number, against the commands as users run them: `make fuzz`."""
