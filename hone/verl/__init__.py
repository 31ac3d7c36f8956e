"""verl's module paths, names and programs, for code and commands that were written for verl.

`hone/__init__` installs the finder of this package. No other part of hone imports it, and hone works
without it.
"""
