"""Tools a model may call in the tool loop: the contract, the YAML list, and built-in ones."""
