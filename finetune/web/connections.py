"""Limits for connections, so that slow clients cannot block a server or fill the disk.

uvicorn waits without limit for the rest of a request, and asyncio logs a traceback for each
connection that it cannot accept. A client that opens many connections and sends half a request on
each would take all file descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["ConnectionLimits", "limit_log_rate"]

MAX_CONNECTIONS = 512
HEAD_SECONDS = 20.0  # longest wait for the head of a request
BODY_SECONDS = 120.0  # longest wait for a request with its body: an upload of 10 MB at 0.7 Mbit/s
SWEEP_SECONDS = 1.0
_NUM_FILES = 4096  # file descriptors: asyncio may accept 2048 connections before it closes any
_LOG_RECORDS_PER_MINUTE = 10
# what a connection waits for, in the order in which connections are closed
_HEAD, _BODY, _ANSWER = 0, 1, 2


class ConnectionLimits:
    """Create uvicorn's protocol for a new connection, and close connections that wait too long.

    Set an instance as `http_protocol_class` of uvicorn's configuration. At `MAX_CONNECTIONS`, a new
    connection replaces the one that has waited longest for the head of a request or, if none waits
    for a head, for a body or an answer. So a client that sends its request is served even if others
    hold all connections.

    Args:
        protocol_class: uvicorn's protocol class for HTTP.
    """

    def __init__(self, protocol_class: Callable[..., Any]) -> None:
        self._protocol_class = protocol_class
        # for each open connection: what it waits for, and since when
        self._states: dict[Any, tuple[tuple[int, int], float]] = {}
        self._next_sweep: asyncio.TimerHandle | None = None
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):  # the system has a lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _NUM_FILES)), hard))
        self._max_connections = min(
            MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        )

    def __call__(self, **options: Any) -> Any:
        """Return the protocol for a new connection; uvicorn calls this in its event loop."""
        protocol = self._protocol_class(**options)
        self._states[protocol] = _state(protocol), time.monotonic()
        if len(self._states) > self._max_connections:
            self._close_excess()
        if self._next_sweep is None:
            loop = asyncio.get_running_loop()
            self._next_sweep = loop.call_later(SWEEP_SECONDS, self._sweep)
        return protocol

    def _sweep(self) -> None:
        """Close the connections that have waited too long; repeat while there are connections."""
        self._close_excess()
        now, limits = time.monotonic(), {_HEAD: HEAD_SECONDS, _BODY: BODY_SECONDS}
        for protocol, ((phase, _), since) in list(self._states.items()):
            if now - since > limits.get(phase, math.inf):
                self._close(protocol)
        self._next_sweep = None
        if self._states:
            loop = asyncio.get_running_loop()
            self._next_sweep = loop.call_later(SWEEP_SECONDS, self._sweep)

    def _close_excess(self) -> None:
        """Update the states; if there are too many connections, close some to have room."""
        now = time.monotonic()
        for protocol, (state, _) in list(self._states.items()):
            if protocol.transport is not None and protocol.transport.is_closing():
                del self._states[protocol]
            elif (new_state := _state(protocol)) != state:
                self._states[protocol] = new_state, now
        if len(self._states) > self._max_connections:
            # close some more, so that not every new connection has to sort all
            num_excess = len(self._states) - self._max_connections + self._max_connections // 8
            by_phase_and_age = sorted(
                self._states, key=lambda one: (self._states[one][0][0], self._states[one][1])
            )
            for protocol in by_phase_and_age[:num_excess]:
                self._close(protocol)

    def _close(self, protocol: Any) -> None:
        if protocol.transport is not None:  # None just after accepting: the next sweep closes it
            del self._states[protocol]
            protocol.transport.abort()


def _state(protocol: Any) -> tuple[int, int]:
    """Return what a connection waits for, and the id of its request."""
    request = protocol.cycle
    if request is None or request.response_complete:
        return _HEAD, id(request)
    return _BODY if request.more_body else _ANSWER, id(request)


@contextlib.contextmanager
def limit_log_rate() -> Iterator[None]:
    """Limit the log lines of the server inside the block to a few per minute."""
    times: deque[float] = deque(maxlen=_LOG_RECORDS_PER_MINUTE)

    def is_allowed(record: logging.LogRecord) -> bool:
        if len(times) == _LOG_RECORDS_PER_MINUTE and time.monotonic() - times[0] < 60:
            return False
        times.append(time.monotonic())
        return True

    loggers = [logging.getLogger(name) for name in ("asyncio", "uvicorn.error")]
    for each in loggers:
        each.addFilter(is_allowed)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(is_allowed)
