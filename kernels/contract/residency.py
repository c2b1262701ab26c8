"""Operations that change which pages frames hold."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from hybrid_backend.kernels.contract.buffers import Copies, Maps


class ResidencyOperations(Protocol):
    """Note importance, plan recalls, copy pages, make them visible, open new pages."""

    def note_scores(
        self, maps: Maps, scores: Tensor, num_pages: Tensor, budgets: Tensor, requests: Tensor, sinks: int, recent: int
    ) -> None:
        """Refresh the importance of one layer's resident pages.

        A page's importance is its highest score of any list; +inf for the first ``sinks`` and last ``recent`` pages,
        -inf for empty frames that are not reserved. Rows that may select all of their pages keep theirs.

        Args:
            maps: residency maps of the layer.
            scores: ``[rows, lists, columns]`` fp32.
            num_pages: ``[rows]`` int32 pages of each sequence.
            budgets: ``[rows]`` int32 pages.
            requests: ``[rows]`` int32 index of each row's request.
            sinks: first pages that are always selected.
            recent: last pages that are always selected.
        """

    def plan_recall(
        self, maps: Maps, copies: Copies, scores: Tensor, table: Tensor, selected: tuple[Tensor, Tensor],
        absent: tuple[Tensor, Tensor], num_pages: Tensor, budgets: Tensor, requests: Tensor, generations: Tensor,
        ages: Tensor, sinks: int, recent: int, interval: int, phase: int, keep: Tensor, counters: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Run `note_scores`, then plan copies of important absent pages into the layer's least important frames.

        A row is due in its first step, and whenever ``(age + phase) % interval`` is 0. The chosen frames are empty from
        then on. Frames whose page is selected, or always is (importance +inf), are not taken. Of equals the lower frame
        goes first, and the page that is listed later comes first.

        Args:
            maps: residency maps of the layer.
            copies: copies of the layer; the first ``rows`` rows are overwritten.
            scores: ``[rows, 1, columns]`` fp32.
            table: block table ``[rows, columns]`` int32, any row stride.
            selected: frames ``[rows, lists, k]`` of selected pages, and their number ``[rows, lists]``.
            absent: logical pages ``[rows, 1, n]`` that were selected and are not resident, and their number ``[rows,
                1]`` (of several lists: `union_pages`).
            num_pages: as in `note_scores`.
            budgets: as in `note_scores`.
            requests: as in `note_scores`.
            generations: ``[rows]`` int32 generation of each row's index when the host opened the step. A request may be
                released before this runs, and its copies must not reach the next owner of the index.
            ages: ``[rows]`` int32 decode steps that the row's request ran before this one.
            sinks: as in `note_scores`.
            recent: as in `note_scores`.
            interval: steps between two recalls of a row.
            phase: offset of the layer's recalls, so that layers take turns.
            keep: ``[>= rows, >= frames]`` int32 scratch.
            counters: counters of the layer (`Counters`), to which the copies are added.
        """

    def copy_pages(self, host: Tensor, frames: Tensor, host_pages: Tensor, frame_ids: Tensor) -> None:
        """Copy whole pages into the frames that were chosen for them.

        Args:
            host: ``[pages, kv_heads, 2, page_size, head_dim]`` as the device tier sees them.
            frames: frames in the layout of ``host``.
            host_pages: int32 host page of each copy.
            frame_ids: int32 frame of each copy, in the shape of ``host_pages``; -1: no copy.
        """

    def commit_pages(self, maps: Maps, copies: Copies, generations: Tensor) -> None:
        """Make the copied pages of all layers in ``copies`` visible, once; to be run when the copies are done.

        Args:
            maps: residency maps of the layers.
            copies: copies of the layers; all entries are empty afterwards.
            generations: ``[requests]`` int64 generation of each index. A page whose request was released since its copy
                began stays invisible.
        """

    def open_pages(
        self, maps: Maps, requests: Tensor, pages: Tensor, positions: Tensor, page_size: int, sinks: int
    ) -> None:
        """Give each page that this step begins a frame in all layers: the least important one, the lowest of equals.

        The page's importance is its number, so that the youngest page outranks the others where importance is age; of
        the first ``sinks`` pages it is +inf. A page that has a frame already, from a step that failed, keeps it.

        Args:
            maps: residency maps of all layers.
            requests: ``[rows]`` int32 index of each row's request.
            pages: ``[rows]`` int32 host page of the row's new token; -1: a padding row.
            positions: ``[rows]`` int32 position of the new token in its sequence.
            page_size: tokens of a page.
            sinks: first pages that are always selected.
        """
