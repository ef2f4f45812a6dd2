# SPDX-License-Identifier: Apache-2.0
"""A step that goes on while its caller does something else, until somebody needs what it updates."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from peftds_ext.errors import StateLostError

logger = logging.getLogger("peftds_ext")

Report = Callable[[int, int], None]
"""Called with a group and with how many of its elements are done, from the first one."""


class LateStep:
    """At most one step at a time, on a thread that lives as long as the process or until :meth:`close`."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="peftds-late-step")
        self._progress = threading.Condition()
        self._done: dict[int, int] = {}
        self._running: Future[None] | None = None
        self._work: Callable[[Report], None] | None = None
        """What has failed before it had changed anything: whoever comes next has it tried again."""

    def begin(self, work: Callable[[Report], None]) -> None:
        """Start ``work``, which steps groups in their order and reports what is done.

        Raises:
            Exception: what the work before this one raised.
        """
        self.finish()
        self._start(work)

    def _start(self, work: Callable[[Report], None]) -> None:
        self._done, self._work = {}, work
        self._running = self._thread.submit(self._run, work, torch.get_num_threads())
        self._running.add_done_callback(lambda _: self._tell())

    def wait_for(self, needed: Mapping[int, int]) -> None:
        """Wait until so many elements of these groups are done.

        Raises:
            Exception: what the work raised.
        """
        running = self._current()
        if running is None:
            return
        with self._progress:
            self._progress.wait_for(
                lambda: running.done() or all(self._done.get(g, 0) >= count for g, count in needed.items())
            )
        if running.done():
            self.finish()

    def finish(self) -> None:
        """Wait until all is done.

        Raises:
            Exception: what the work raised. StateLostError is raised to every call; with any other nothing
                was changed, and the next call has the work tried again.
        """
        running = self._current()
        if running is None:
            return
        try:
            running.result()
        except StateLostError:
            raise
        except Exception:
            self._running = None
            raise
        self._running = self._work = None

    def _current(self) -> Future[None] | None:
        """Return what is under way, after starting again what has failed."""
        if self._running is None and self._work is not None:
            self._start(self._work)
        return self._running

    def close(self) -> None:
        """End the thread when it has done its work; what nobody has asked for is logged. Idempotent."""
        self._thread.shutdown()
        running, self._running = self._running, None
        error = running.exception() if running is not None else None
        if error is not None:
            logger.error("the last step failed: %s", error)

    def _run(self, work: Callable[[Report], None], threads: int) -> None:
        torch.set_num_threads(threads)  # of this thread
        work(self._report)

    def _report(self, group: int, count: int) -> None:
        with self._progress:
            self._done[group] = count
            self._progress.notify_all()

    def _tell(self) -> None:
        with self._progress:
            self._progress.notify_all()
