"""For processes that start one engine after another."""

from __future__ import annotations

import gc


def leave_out_what_was_imported() -> None:
    """vLLM collects garbage about seven times for each engine, each time through all that was ever imported, which took
    most of a tiny engine's time. From now on through what comes after, and nothing else is left out."""
    gc.collect()
    gc.freeze()
    vars(gc).update(freeze=lambda: None, unfreeze=lambda: None)
