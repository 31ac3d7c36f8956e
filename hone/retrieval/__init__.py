"""Passages for a question: corpus, BM25 and dense indexes, their HTTP service and its client."""
