"""Tools of the tool loop: the contract, the YAML list, and the built-in tools."""
