"""Parsers of tool calls in model text."""
