# SPDX-License-Identifier: Apache-2.0
"""Every exception that the package raises on purpose, under one base class.

Each class also derives from the built-in exception that callers already catch, so that
``except ValueError`` keeps working.
"""

from __future__ import annotations


class PeftdsError(Exception):
    """Base of all errors of this package."""


class ConfigError(PeftdsError, ValueError):
    """The ``peftds_ext`` section, or an environment variable, holds something that is not valid."""


class ConflictError(PeftdsError, ValueError):
    """Another DeepSpeed feature that is switched on excludes the engine."""


class UnsupportedVersionError(PeftdsError, RuntimeError):
    """An installed library is not one that the engine knows how to plug into."""


class NativeLoadError(PeftdsError, ImportError):
    """A compiled module is missing or cannot be loaded on this machine."""


class MissingDependencyError(PeftdsError, ImportError):
    """An optional package is needed; the message gives the command that installs it."""


class StorageError(PeftdsError, OSError):
    """A file or folder could not be used; the message names the operation, path, offset, sizes and remedy.

    ``errno`` and ``filename`` are set where the operating system refused.
    """


class StorageFullError(StorageError):
    """The disk, or the user's quota on it, has no room for what is to be written."""


class CorruptDataError(StorageError):
    """A file is shorter than it was, or holds other bytes than were written."""


class StateLostError(StorageError):
    """A step failed half-way: the optimizer's states are neither the old nor the new ones."""


class CheckpointError(PeftdsError, ValueError):
    """A checkpoint's file or index is damaged, hostile or incomplete."""
