"""Parsers of tool calls in model text, one file each."""
