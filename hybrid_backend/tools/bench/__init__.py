"""``hybrid bench``: compares servers under load and in the accuracy of their answers, stock and hybrid side by side."""
