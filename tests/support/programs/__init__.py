"""Programs and commands that tests run, and what they say."""
