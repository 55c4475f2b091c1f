"""What the operating system reports: memory, control groups, child processes."""
