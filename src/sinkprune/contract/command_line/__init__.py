"""What every command shares: its start, parser, JSON, progress and exit codes."""
