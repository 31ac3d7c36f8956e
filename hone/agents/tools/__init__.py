"""Tools that a model may call in the tool loop: the contract, the YAML list, and the built-in tools."""
