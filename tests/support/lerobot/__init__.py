"""Programs for LeRobot's own environment, and what stands in for LeRobot in ours."""
