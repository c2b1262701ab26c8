"""The steps in which a request selects its pages again, when a selection lasts several steps (`selection.interval`)."""

from __future__ import annotations

import torch
from torch import Tensor


class SelectionEpochs:
    """Numbers the epochs of the running requests: a request attends one selection per layer during an epoch.

    The number of an epoch is that of its first step, so no later request has the same one. An epoch ends when it is as
    old as the interval, and when the selection does not fit the row any more: the request has another number of pages,
    another budget or another batch row. Selections are stored by batch row. If the first step of an epoch ends before
    a layer has run, the layer selects in the next step, because the device compares the numbers per layer.

    Args:
        steps: tokens of a request in an epoch, at most.
        requests: number of request indices (`FramePool.index`).
    """

    def __init__(self, steps: int, requests: int) -> None:
        self._steps = steps
        self._epochs = torch.zeros(requests, dtype=torch.int64)
        self._first_tokens = torch.zeros(requests, dtype=torch.int64)
        """Tokens of each sequence at the beginning of its epoch."""
        self._conditions = torch.full((requests, 3), -1)
        """Batch row, pages and budget of each request in its epoch; -1: the request has no epoch."""

    def of_rows(self, number: int, indices: Tensor, seq_lens: Tensor, num_pages: Tensor, budgets: Tensor) -> Tensor:
        """Return the epoch of each row in step ``number``, ``[rows]`` int64 >= 1.

        Args:
            number: number of the step (`StepInputs.number`), at least 1.
            indices: ``[rows]`` int64 request index of each row.
            seq_lens: ``[rows]`` int64 tokens of each sequence.
            num_pages: ``[rows]`` int64 pages of each sequence.
            budgets: ``[rows]`` int64 pages that a layer attends on average.
        """
        conditions = torch.stack([torch.arange(len(indices)), num_pages, budgets], 1)
        age = seq_lens - self._first_tokens[indices]
        continues = (self._conditions[indices] == conditions).all(1) & (age >= 0) & (age < self._steps)
        epochs = torch.where(continues, self._epochs[indices], number)
        self._epochs[indices], self._conditions[indices] = epochs, conditions
        self._first_tokens[indices] = torch.where(continues, self._first_tokens[indices], seq_lens)
        return epochs

    def end(self, index: int) -> None:
        """End the epoch of the request with this index, because the request ended or its last step failed."""
        self._conditions[index] = -1
