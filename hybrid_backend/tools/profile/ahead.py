"""Which layers select by their own query, because the one that the layer before predicts costs too much.

The cosine of both queries does not tell: one layer of Qwen2.5-Coder-0.5B with a cosine of 0.97 costs more than all
others together, one with 0.76 nothing (docs/profile.md). So answers are compared, as for the layers that are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TIMES = 1.5
"""Factor by which predicted queries may raise the KL of true ones."""


@dataclass(frozen=True)
class Ahead:
    """Mean KL to dense in nats per token, by kind of probe.

    ``alone``: ``[kind][layer]``, (by its true query, by the predicted one) of this layer sparse, all others dense; of
    the layers whose query may be predicted. ``true``: of all sparse layers, true queries. ``little``: below that nobody
    asks where it comes from. ``together``: of all sparse layers, by predicted queries but for so many layers of the
    `ranking` as its place says.
    """

    alone: Mapping[str, Mapping[int, tuple[float, float]]]
    true: Mapping[str, float]
    little: float
    together: Sequence[Mapping[str, float]] = ()

    @property
    def ranking(self) -> list[int]:
        """The layer that loses most by the predicted query first."""
        layers = next(iter(self.alone.values()))
        lost = {x: max(kl[x][1] - kl[x][0] for kl in self.alone.values()) for x in layers}
        return sorted(layers, key=lambda layer: (-lost[layer], layer))

    @property
    def own(self) -> list[int] | None:
        """The fewest layers that must select by their own query; None: ``together`` does not say yet."""
        for count, left in enumerate(self.together):
            if all(kl <= max(TIMES * self.true[kind], self.little) for kind, kl in left.items()):
                return sorted(self.ranking[:count])
        return sorted(self.ranking) if len(self.together) > len(self.ranking) else None
