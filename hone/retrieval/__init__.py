"""Passage retrieval: corpus, BM25 and dense indexes, HTTP service and client."""
