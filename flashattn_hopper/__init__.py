"""Exact attention for LLM training."""
