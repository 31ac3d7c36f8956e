"""Built-in agent loops with tools and with search."""
