"""`hone launch` runs a command on a Ray cluster of several machines; `hone jobs` lists jobs."""

STOPPED_EXIT_STATUS = 130
"""The exit status after a stop; a shell reports it for Ctrl-C."""
