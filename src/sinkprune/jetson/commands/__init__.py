"""Commands for the robot's computer."""
