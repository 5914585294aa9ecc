"""Ctrl-C and SIGTERM as a question asked between two steps, so that a step is never cut in half."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stopping(active: bool) -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether the user asked to stop; a second Ctrl-C stops at once.

    Not active under torchrun, whose agent ends its workers itself, nor outside the main thread.
    """
    asked = threading.Event()
    if not active or threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
