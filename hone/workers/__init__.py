"""Workers run the engines of each role in a process; their methods are named as in verl."""
