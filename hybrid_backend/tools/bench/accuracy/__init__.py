"""``hybrid bench accuracy``: what each method costs in answers, not only in distributions."""
