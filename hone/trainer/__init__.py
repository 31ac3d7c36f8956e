"""The training loops and the programs that start them."""
