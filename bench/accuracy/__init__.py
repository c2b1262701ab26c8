"""Accuracy bench: what each method costs in answers, not only in distributions (``python -m bench.accuracy``)."""
