"""Workers: where an engine meets a process, by the family's method names."""
