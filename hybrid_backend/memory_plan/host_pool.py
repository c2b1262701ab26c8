"""Size of each rank's host pool: the user's, checked against the memory of the machine, or half of what is free."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_backend.config import format_size
from hybrid_backend.errors import ConfigError
from hybrid_backend.host_memory import Room, check_pool, size_text


@dataclass(frozen=True)
class PoolSize:
    """Size of a host pool, and the setting that it comes from, which errors name.

    Attributes:
        setting: key of the configuration, flag or environment variable.
        bytes: size of one rank's pool; None lets `choose_pool` take `Room.auto`.
    """

    setting: str
    bytes: int | None = None


def choose_pool(size: PoolSize, room: Room) -> int:
    """Return the bytes of one rank's host pool.

    Args:
        size: the user's size, if there is one.
        room: memory that one rank's pool can have.

    Raises:
        ConfigError: the user's size is more than the pool can have.
    """
    if size.bytes is None:
        return room.auto
    check_pool(size.setting, size.bytes, room)
    return size.bytes


@dataclass(frozen=True)
class LongestSequence:
    """The sequence of ``--max-model-len`` that a host pool must hold.

    Attributes:
        tokens: its length.
        page_size: tokens per block.
        block_bytes: bytes of a block in all layers with full attention, on one rank.
    """

    tokens: int
    page_size: int
    block_bytes: int

    def check_fits(self, size: PoolSize, room: Room) -> None:
        """Check that a pool holds the sequence.

        Only layers with full attention are counted: the engine itself checks the sum with all other layers.

        Raises:
            ConfigError: the pool is too small.
        """
        # The engine reserves one block, the null block.
        needed = (-(-self.tokens // self.page_size) + 1) * self.block_bytes
        pool_bytes = room.auto if size.bytes is None else size.bytes
        if pool_bytes >= needed:
            return
        least, shorter = f"{-(-needed // 2**20)} MiB", (pool_bytes // self.block_bytes - 1) * self.page_size
        fixes = [f"at least {least}"] if needed <= room.most else []
        fixes += [f"--max-model-len {shorter} or less"] if shorter > 0 else []
        setting = f"{size.setting}: {format_size(pool_bytes)}"
        if size.bytes is None:
            setting = f"{size.setting}: auto, which is {size_text(room.auto)} here ({room.why}),"
        raise ConfigError(
            f"{setting} holds less than one sequence of --max-model-len {self.tokens} ({least}); "
            f"choose {' or '.join(fixes or ['a machine with more memory'])}"
        )
