"""The maths: partial attention and merge, selection, prefill, quality."""
