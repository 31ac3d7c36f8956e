"""verl's module paths, names, programs and keys, for code and commands that were written for verl.

`hone/__init__` installs the finder of this package and gives its dialect to `compose`. No other part of hone
imports it, and hone works without it.
"""
