"""Passages found for a question: corpus, BM25 and dense indexes, and their HTTP service."""
