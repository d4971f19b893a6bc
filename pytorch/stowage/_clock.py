"""Clocks: the time of work on a device."""

from __future__ import annotations

import time
from typing import Any, List, Tuple

import torch

# Cycles of the device, about ten milliseconds.
FILL = 20_000_000


class Clock:
    """Stamps of the device's time, or of the host's if that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._stamps: List[Any] = []
        self._idle = 0  # stamps that the device had passed when the host made the next one

    def stamp(self) -> int:
        if self._cuda:
            self._idle += bool(self._stamps and self._stamps[-1].query())
            e = torch.cuda.Event(enable_timing=True)
            e.record(torch.cuda.current_stream(self._device))
            self._stamps.append(e)
        else:
            self._stamps.append(time.perf_counter())
        return len(self._stamps) - 1

    def fill(self) -> None:
        """Gives the device work, so that what follows waits for the device and not for the
        host, as in a step that the device bounds."""
        if self._cuda:
            with torch.cuda.device(self._device):
                torch.cuda._sleep(FILL)

    def behind(self) -> Tuple[float, bool]:
        """Waits for the device, and returns for how many seconds: hardly at all if the device waits for the host.
        A CPU never does. It also returns whether the device was idle between most stamps: otherwise it may be
        the step that waited for it, as one that reads its loss does."""
        if not self._cuda:
            return float("inf"), False
        host = time.perf_counter()
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - host, 2 * self._idle > len(self._stamps) - 1

    def read(self) -> List[float]:
        """Returns the stamps in seconds after the first. It waits for the device."""
        if not self._stamps:
            return []
        first = self._stamps[0]
        if not self._cuda:
            return [s - first for s in self._stamps]
        torch.cuda.synchronize(self._device)
        return [first.elapsed_time(s) / 1e3 for s in self._stamps]


class Stopwatch:
    """The time of a step on its device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wait()  # the host's head start is no part of the step
        self._began = time.perf_counter()

    def seconds(self) -> float:
        self._wait()
        return time.perf_counter() - self._began

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
