"""Built-in agent loops, one file each."""
