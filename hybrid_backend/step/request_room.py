"""Limit of the requests that run at once, which a method gives to the engine's scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class RequestRoom(NamedTuple):
    """Tokens of running requests, above which every request becomes slower.

    Requests are on the device tier in the order of their arrival, as long as they fit.

    Attributes:
        device_tokens: tokens that the device tier holds.
        cpu_tokens: tokens of requests on the CPU that delay no request on the device.
    """

    device_tokens: int
    cpu_tokens: int

    def startable(self, running: Iterable[int], waiting: Iterable[int]) -> int:
        """Return how many of the first waiting requests may start. If nothing runs, the first one always may.

        Args:
            running: tokens of each running request, in the order of their arrival.
            waiting: tokens of each waiting request, the next one first.
        """
        device = cpu = requests = 0

        def place(tokens: int) -> bool:
            nonlocal device, cpu
            if device + tokens <= self.device_tokens:
                device += tokens
                return True
            cpu += tokens
            return cpu <= self.cpu_tokens

        for tokens in running:
            place(tokens)
            requests += 1
        started = 0
        for tokens in waiting:
            if not place(tokens) and requests:
                break
            requests, started = requests + 1, started + 1
        return started
