"""``hybrid bench``: what servers do under load and how right they answer, stock and hybrid side by side."""
