"""`hone launch` runs a command on a Ray cluster of several machines; `hone jobs` lists jobs."""

STOPPED_EXIT_STATUS = 130
"""The exit status after a stop; the status that a shell reports for Ctrl-C."""


class LaunchError(ValueError):
    """A wrong option of a launch, or a node that did not start."""
