"""``hybrid bench accuracy``: the loss of each method in answers and in next-token distributions, against dense."""
