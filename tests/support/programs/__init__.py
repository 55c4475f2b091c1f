"""Programs and commands that tests run."""
