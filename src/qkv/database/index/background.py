"""The handle of an index that is built in its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

from qkv.util.types import ProgressCallback

if TYPE_CHECKING:  # imported only by callers that need it
    from qkv.database.index.calibration import IndexReport


class IndexBuild:
    """An index that is built in the background, from `Database.index(background=True)`.

    Until it is finished, answers are exact, or they use the index that exists already. Closing the
    database cancels the build, and so does the end of the process. Finished segments stay.
    """

    def __init__(
        self,
        build: Callable[[ProgressCallback | None], IndexReport],
        progress: ProgressCallback | None,
    ) -> None:
        self._build, self._progress = build, progress
        self._report: IndexReport | None = None
        self._error: BaseException | None = None
        self._is_canceled = False
        # The end of the process does not wait for a daemon thread.
        self._thread = threading.Thread(target=self._run, name="qkv-index", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        if not self.is_done:
            return "<IndexBuild: running>"
        return f"<IndexBuild: {self._report if self._error is None else repr(self._error)}>"

    @property
    def is_done(self) -> bool:
        """Whether the index is finished, was canceled or has failed."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> IndexReport:
        """Wait until the index is finished, and return what it achieves.

        Raise the error of the build if it failed, `concurrent.futures.CancelledError` if it was
        canceled, and `TimeoutError` if it is not finished after `timeout` seconds.
        """
        self._thread.join(timeout)
        if not self.is_done:
            raise TimeoutError(f"the index is not finished after {timeout:g} seconds")
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report

    def cancel(self) -> None:
        """Stop the build after the block of rows that it works on; return at once."""
        self._is_canceled = True

    def _run(self) -> None:
        try:
            self._report = self._build(self._report_progress)
        except BaseException as error:
            self._error = error

    def _report_progress(self, done: int, total: int | None) -> None:
        if self._is_canceled:
            raise CancelledError("the index was canceled")
        if self._progress is not None:
            self._progress(done, total)
