"""Checks that may refuse a run before its models load; the trainer collects their problems."""
