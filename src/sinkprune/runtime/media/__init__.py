"""Pictures and videos: files, cameras' arrays and clips to RGB frames."""
