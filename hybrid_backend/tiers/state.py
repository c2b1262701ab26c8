"""What decode steps keep on the device tier beside frames and digests: a step's inputs, the residency maps,
counters."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybrid_backend.batch import ModelSpec
from hybrid_backend.kernels.operations import Copies, Counters, Maps, Sample


@dataclass(frozen=True)
class StepInputs:
    """What changes from step to step, one entry per row. A row of padding has ``num_pages`` 0 and ``pages`` -1."""

    table: Tensor  # [rows, columns] int32 host pages
    num_pages: Tensor  # [rows] int32
    seq_lens: Tensor  # [rows] int32 tokens, with this step's
    positions: Tensor  # [rows] int32 of this step's token
    pages: Tensor  # [rows] int32 host page of this step's token
    requests: Tensor  # [rows] int32 index of the row's request (`FramePool`)
    generations: Tensor  # [rows] int32, of the indices when the host opened the step
    budgets: Tensor  # [rows] int32 pages that a layer with digests may attend
    ages: Tensor  # [rows] int32 decode steps that the request has run before
    number: Tensor  # [1] int32, grows by one per step
    layer_budgets: Tensor  # [layers, rows] int32 pages, where layers have budgets of their own; else [0, rows]
    sampled: Tensor  # [layers] int32 row of which the layer is sampled in this step, plus 1; 0: it is not
    small: Tensor  # all of the above but table and pages, one after the other, so that one copy writes them

    PER_ROW = ("num_pages", "seq_lens", "positions", "requests", "generations", "budgets", "ages")

    @classmethod
    def zeros(cls, rows: int, columns: int, layers: int, budgets: int, device: torch.device) -> StepInputs:
        """``layers``: that may be sampled; ``budgets``: layers that have budgets of their own."""
        count = len(cls.PER_ROW)
        table, pages, small = (
            torch.zeros(shape, dtype=torch.int32, device=device)
            for shape in ((rows, columns), (rows,), ((count + budgets) * rows + layers + 1,))
        )
        by_row, sampled, number = cls.parts(small, rows, layers)
        named = {name: by_row[at] for at, name in enumerate(cls.PER_ROW)}
        return cls(
            table=table, pages=pages, number=number, layer_budgets=by_row[count:], sampled=sampled, small=small, **named
        )  # fmt: skip

    @classmethod
    def parts(cls, small: Tensor, rows: int, layers: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of `small`, here or on the host: ``([PER_ROW and layer_budgets, rows], sampled [layers], number [1])``."""
        by_row, sampled, number = small.split([len(small) - layers - 1, layers, 1])
        return by_row.view(-1, rows), sampled, number

    def first(self, rows: int) -> StepInputs:
        """Of a step that has fewer rows."""
        per_row = {name: getattr(self, name)[:rows] for name in ("table", "pages", *self.PER_ROW)}
        per_row["layer_budgets"] = self.layer_budgets[:, :rows]
        return self if rows == len(self.num_pages) else replace(self, **per_row)

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self.pages.nbytes + self.small.nbytes


@dataclass(frozen=True)
class StepState:
    """Fixed buffers that the operations of all steps work on."""

    inputs: StepInputs
    maps: Maps
    copies: Copies
    equal_scores: Tensor  # [rows, 1, columns] fp32 zeros, of layers that attend every page
    keep: Tensor  # [2, rows, frames] int32, scratch of `plan_recall`, of layers in turn: two may run side by side
    empty: Tensor  # [layers, frames] fp32 importance of a request's frames while nobody has them
    counters: Tensor  # [layers, COUNTERS] int64
    arrived: Tensor  # [layers] int32 zeros, scratch of `take_sample`

    @classmethod
    def make(
        cls, rows: int, columns: int, frames: int, recalls: int, layers: int, device: torch.device, budgets: int = 0
    ) -> StepState:
        """``rows`` requests run at once; ``frames`` of each, 0: none. ``budgets``: layers that have budgets of their
        own. On ``meta``, to learn its size."""
        planned, mapped = (layers, rows, recalls), columns if frames else 0

        def ints(shape: tuple[int, ...], value: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        return cls(
            inputs=StepInputs.zeros(rows, columns, layers, budgets, device),
            maps=Maps(
                ints((layers, rows, mapped), -1),
                ints((layers, rows * frames), -1),
                torch.full((layers, rows * frames), float("-inf"), device=device),
            ),
            copies=Copies(
                ints(planned, -1), ints(planned), ints(planned), torch.zeros(planned, device=device),
                ints(planned[:2]), ints(planned[:2], dtype=torch.int64),
            ),
            equal_scores=torch.zeros(rows, 1, columns, device=device),
            keep=ints((2, rows, frames)),
            empty=torch.full((layers, frames), float("-inf"), device=device),
            counters=ints((layers, len(Counters._fields)), dtype=torch.int64),
            arrived=ints((layers,)),
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        return self.inputs.nbytes + sum(
            x.nbytes
            for x in (*self.maps, *self.copies, self.equal_scores, self.keep, self.empty, self.counters, self.arrived)
        )


def sample_boxes(
    model: ModelSpec, layers: int, rows: int, columns: int, lists: int, most: int, device: str = "cpu",
    pin: bool = False,
) -> Sample:  # fmt: skip
    """Where ``layers`` layers hand their samples over: of steps of ``rows`` rows and sequences of ``columns`` pages, of
    which a layer selects ``lists`` lists of at most ``most``. On ``meta``, to learn their size."""

    def made(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(layers, *shape, dtype=dtype, device=device, pin_memory=pin)

    return Sample(
        q=made(model.num_heads, model.head_dim, dtype=model.dtype),
        table=made(columns),
        pages=made(lists, most),
        listed=made(lists),
        cosines=made(rows, model.num_heads, dtype=torch.float32),
        number=made(1),
    )
