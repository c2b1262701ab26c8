"""Attention of prompts and of page lists, FlashInfer, predicted queries, and measures of approximation errors."""
