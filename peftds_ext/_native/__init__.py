# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled modules and says why one cannot be loaded."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from peftds_ext.errors import NativeLoadError


@functools.cache
def core() -> ModuleType:
    """Import and return ``_core``; this registers the CPU operators.

    Raises:
        NativeLoadError: the module was not built for this Python or torch.
    """
    # torch first: it brings the libraries that the module links to.
    importlib.import_module("torch")
    try:
        return importlib.import_module("peftds_ext._native._core")
    except ImportError as error:
        raise NativeLoadError(
            f"the compiled core of peftds_ext cannot be loaded ({error}); build it for this Python and "
            "torch: pip install --no-build-isolation ."
        ) from error


@functools.cache
def cuda_status() -> tuple[bool, str]:
    """Load ``_cuda`` where there is a GPU; return whether it is loaded, and the reason if not."""
    import torch

    core()
    if torch.version.cuda is None:
        return False, f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return False, "torch sees no CUDA device"
    try:
        importlib.import_module("peftds_ext._native._cuda")
    except ImportError as error:
        return False, f"the CUDA kernels are not built or cannot be loaded: {error}"
    return True, ""


def cuda_page_lock() -> object | None:
    """Return how an engine's memory is locked for copies to and from GPUs, or None where there is none."""
    if not cuda_status()[0]:
        return None
    page_lock: object = importlib.import_module("peftds_ext._native._cuda").page_lock()
    return page_lock
