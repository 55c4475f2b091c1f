"""Recordings of ROS 2: bags are read, and answers are written as MCAP. Neither needs ROS."""
