"""What a request costs on a machine, in memory and in files."""
