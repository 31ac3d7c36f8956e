"""Stands in for SGLang in tests."""
