"""`hone launch` runs a command on a Ray cluster of several machines; `hone jobs` lists jobs."""
