"""`hone launch` runs one command on a Ray cluster of several machines; `hone jobs` lists its jobs."""
