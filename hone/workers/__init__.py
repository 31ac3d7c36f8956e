"""Workers: where an engine meets a process, by verl's method names."""
