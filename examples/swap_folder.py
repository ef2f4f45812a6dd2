# SPDX-License-Identifier: Apache-2.0
"""The folder on NVMe: a temporary one, what it holds, and what is left in it at the very end.

Import this module before torch and DeepSpeed. Exit handlers run in the reverse order of their
registration, so the one that is registered here runs after the libraries have cleared up at exit.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

PATIENCE_SECONDS = 10.0
"""How long the last look waits for other ranks, which clear up at their own exit."""

_at_exit = contextlib.ExitStack()
atexit.register(_at_exit.close)


def temporary_folder(parent: Path) -> Path:
    """Make a folder of this process's own below ``parent``; it is removed when the process exits."""
    parent.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix="swap-", dir=parent.resolve()))
    _at_exit.callback(shutil.rmtree, path)
    return path


class WatchedFolder:
    """A folder that may hold other things already: only what came later counts."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path.resolve()
        self._before = _sizes(self.path).keys()

    def new(self) -> dict[Path, int]:
        """Return the files and folders that came, with the bytes of the files (0 for a folder)."""
        return {path: size for path, size in _sizes(self.path).items() if path not in self._before}

    def tell_at_exit(self, ranks: int) -> None:
        """Print what is left when this process ends, and with several ``ranks`` the others as well."""
        _at_exit.callback(self._tell, PATIENCE_SECONDS if ranks > 1 else 0.0)

    def _tell(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        while any((left := self.new()).values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        print(f"left in {self.path}: {_description(left)}", flush=True)


def _description(left: Mapping[Path, int]) -> str:
    if not left:
        return "nothing"
    if not any(left.values()):
        return f"nothing but {len(left)} empty files and folders"
    return f"{len(left)} files and folders, {sum(left.values()) / 1e6:.2f} MB"


def _sizes(folder: Path) -> dict[Path, int]:
    """Return everything below ``folder``; what other processes remove meanwhile is left out."""
    found: dict[Path, int] = {}
    for parent, folders, files in os.walk(folder):
        found.update({Path(parent, name): 0 for name in folders})
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                found[Path(parent, name)] = Path(parent, name).lstat().st_size
    return found
