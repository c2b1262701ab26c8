"""``hybrid bench``: what running servers do under load, stock and hybrid side by side."""
