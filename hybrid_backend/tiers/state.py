"""Tensors of decode steps on the device tier, other than frames and digests: inputs, residency maps and counters."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybrid_backend.batch import ModelSpec
from hybrid_backend.kernels.cpu import STEPS
from hybrid_backend.kernels.operations import AwaitedPages, Copies, Counters, Maps, Reuse, Sample


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a decode step, one entry per row. A padding row has ``num_pages`` 0 and ``pages`` -1."""

    table: Tensor  # [rows, columns] int32 block table: host page ids
    num_pages: Tensor  # [rows] int32 pages of the sequence
    seq_lens: Tensor  # [rows] int32 tokens of the sequence, the new token included
    positions: Tensor  # [rows] int32 position of the new token
    pages: Tensor  # [rows] int32 host page of the new token
    requests: Tensor  # [rows] int32 request index (`FramePool.index`)
    generations: Tensor  # [rows] int32 generation of the request index at the start of the step
    budgets: Tensor  # [rows] int32 pages that a layer with digests may attend
    ages: Tensor  # [rows] int32 decode steps that the request has run before this one
    epochs: Tensor  # [rows] int32 number that changes when the row has to select its pages again (`SelectionEpochs`)
    number: Tensor  # [1] int32 number of the step, increased by 1 per step
    layer_budgets: Tensor  # [layers, rows] int32 budgets of each layer in pages; [0, rows] if all layers use `budgets`
    sampled: Tensor  # [layers] int32: 1 + the row that the layer samples in this step; 0: the layer is not sampled
    small: Tensor  # all inputs except `table` and `pages` in one tensor, so that one copy writes them

    PER_ROW = ("num_pages", "seq_lens", "positions", "requests", "generations", "budgets", "ages", "epochs")

    @classmethod
    def zeros(cls, rows: int, columns: int, layers: int, budgets: int, device: torch.device) -> StepInputs:
        """Allocate the inputs of ``rows`` rows and ``columns`` pages per row, all 0.

        ``layers`` is the length of `sampled`; ``budgets`` is the number of layers in `layer_budgets`.
        """
        count = len(cls.PER_ROW)
        table, pages, small = (
            torch.zeros(shape, dtype=torch.int32, device=device)
            for shape in ((rows, columns), (rows,), ((count + budgets) * rows + layers + 1,))
        )
        by_row, sampled, number = cls.split_small(small, rows, layers)
        per_row = {name: by_row[index] for index, name in enumerate(cls.PER_ROW)}
        return cls(
            table=table, pages=pages, number=number, layer_budgets=by_row[count:], sampled=sampled, small=small,
            **per_row,
        )  # fmt: skip

    @classmethod
    def split_small(cls, small: Tensor, rows: int, layers: int) -> tuple[Tensor, Tensor, Tensor]:
        """Split `small` or a tensor of its shape into views: `PER_ROW` with `layer_budgets`; `sampled`; `number`."""
        by_row, sampled, number = small.split([len(small) - layers - 1, layers, 1])
        return by_row.view(-1, rows), sampled, number

    def first(self, rows: int) -> StepInputs:
        """Return views of the first ``rows`` rows, for a step with fewer rows."""
        per_row = {name: getattr(self, name)[:rows] for name in ("table", "pages", *self.PER_ROW)}
        per_row["layer_budgets"] = self.layer_budgets[:, :rows]
        return self if rows == len(self.num_pages) else replace(self, **per_row)

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self.pages.nbytes + self.small.nbytes


@dataclass(frozen=True)
class StepState:
    """Buffers of the operations, at fixed addresses, because CUDA graphs are captured with them."""

    inputs: StepInputs
    maps: Maps
    copies: Copies
    equal_scores: Tensor  # [rows, 1, columns] fp32 zeros: page scores of layers that attend every page
    keep: Tensor  # [2, rows, frames] int32 scratch of `plan_recall`: layers alternate, because two may run in parallel
    empty: Tensor  # [layers, frames] fp32 importance of the frames of a request index that no request has
    counters: Tensor  # [layers, len(Counters._fields)] int64
    arrived: Tensor  # [layers] int32 zeros: scratch of `take_sample`
    reuse: Reuse  # selections that rows attend again, of all layers; [0, ...] if each step selects
    awaited: AwaitedPages  # copies that rows wait for, of all layers

    @classmethod
    def make(
        cls, rows: int, columns: int, frames: int, recalls: int, layers: int, device: torch.device, budgets: int = 0,
        reused: tuple[int, int] = (0, 0),
    ) -> StepState:  # fmt: skip
        """Allocate the buffers. Device ``meta`` allocates nothing and gives the size.

        ``rows``, ``columns``, ``frames`` (as `max_frames`) and ``recalls`` are those of `StepShape`; ``budgets`` is the
        number of layers in `StepInputs.layer_budgets`; ``reused`` is `StepShape.reused`.
        """
        planned, mapped = (layers, rows, recalls), columns if frames else 0
        (lists, most), inputs = reused, StepInputs.zeros(rows, columns, layers, budgets, device)
        listed = (layers if lists else 0, rows, lists)

        def ints(shape: tuple[int, ...], value: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        return cls(
            inputs=inputs,
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
            reuse=Reuse(
                inputs.epochs, ints(listed), ints((*listed, most)), ints(listed),
                torch.zeros(*listed, columns, device=device),
            ),
            awaited=AwaitedPages(
                ints((rows,)), ints((layers,)), inputs.number,
                torch.zeros(STEPS, rows, dtype=torch.int32, pin_memory=device.type == "cuda"),
                ints((1,), dtype=torch.int64),
            ),
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        tensors = (
            *self.maps, *self.copies, self.equal_scores, self.keep, self.empty, self.counters, self.arrived,
        )  # fmt: skip
        return self.inputs.nbytes + self.reuse.nbytes + self.awaited.nbytes + sum(x.nbytes for x in tensors)


def sample_boxes(
    model: ModelSpec, layers: int, rows: int, columns: int, lists: int, list_pages: int, device: str = "cpu",
    pin: bool = False,
) -> Sample:  # fmt: skip
    """Allocate the memory to which layers write their samples. Device ``meta`` allocates nothing and gives the size.

    A layer has up to ``lists`` selections of up to ``list_pages`` pages per row.
    """

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(layers, *shape, dtype=dtype, device=device, pin_memory=pin)

    return Sample(
        q=zeros(model.num_heads, model.head_dim, dtype=model.dtype),
        table=zeros(columns),
        pages=zeros(lists, list_pages),
        listed=zeros(lists),
        cosines=zeros(rows, model.num_heads, dtype=torch.float32),
        number=zeros(1),
    )
