"""What a layer of ours launches in a captured decode step: kernels and operators of its lookahead and attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.support.streams import STREAMS

Launches = dict[int, Counter[str]]


def count_launches() -> Launches:
    """From now on, in this process: by layer, the launches of the last full graph. Those of a layer's prediction, which
    run at the layer before it, are its own."""
    from hybrid_backend.engines.vllm.layer import HybridImpl

    found: Launches = {}

    def counted(call: Callable[..., Any], is_first: bool) -> Callable[..., Any]:
        def wrapper(self: HybridImpl, *args: Any, **kwargs: Any) -> Any:
            graph = STREAMS.graph
            before = 0 if graph is None else len(graph.works)
            out = call(self, *args, **kwargs)
            if graph is not None:
                if is_first or self.predictor is None:
                    found[self.layer_index] = Counter()
                found[self.layer_index].update(graph.works[before:])
            return out

        return wrapper

    HybridImpl.lookahead = counted(HybridImpl.lookahead, True)  # type: ignore[method-assign]
    HybridImpl.forward = counted(HybridImpl.forward, False)  # type: ignore[method-assign]
    return found


def count_mixed(runtime: Any) -> dict[str, int]:
    """From now on: the steps that have prompts beside decode rows, and the lookaheads in them."""
    counts, begin, lookahead = {"steps": 0, "lookaheads": 0}, runtime.begin_step, runtime.lookahead

    def beginning(batch: Any) -> Any:
        step = begin(batch)
        counts["steps"] += bool(step.prefill) and step.decode is not None
        return step

    def looking_ahead(layer: int, step: Any, q: Any) -> None:
        counts["lookaheads"] += bool(step.prefill)
        lookahead(layer, step, q)

    runtime.begin_step, runtime.lookahead = beginning, looking_ahead
    return counts
