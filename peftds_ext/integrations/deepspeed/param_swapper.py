# SPDX-License-Identifier: Apache-2.0
"""Parameters on NVMe or on a plain disk: what stands in the place of DeepSpeed's parameter swapper.

DeepSpeed's own (deepspeed/runtime/swap_tensor/partitioned_param_swapper.py) has a fixed number of uniform
buffers, one file per parameter, and one folder for all models and runs. Here a parameter that comes in
gets memory of its exact size, all parameters of a rank lie in one file, and each model of each process
has a folder of its own.

The protocol on ``param.ds_tensor`` is DeepSpeed's: ``status`` is AVAILABLE while ``data`` is the partition,
INFLIGHT while a read-ahead is under way, and NOT_AVAILABLE while the partition is on the disk alone.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from peftds_ext.integrations.deepspeed import accelerator
from peftds_ext.integrations.deepspeed.offload import NVME_PATH, memory_budget
from peftds_ext.integrations.deepspeed.section import read_section
from peftds_ext.store.engine import StorageEngine, choose_settings
from peftds_ext.store.folder import StoreFolder
from peftds_ext.store.records import PendingRecords, Records, Source
from peftds_ext.store.swap_file import SwapFile

logger = logging.getLogger("peftds_ext")

_MIN_SWAPPED_BYTES: Final = 1 << 20
"""Smaller partitions stay in memory (deepspeed/runtime/swap_tensor/utils.py, MIN_AIO_BYTES)."""


@dataclass(frozen=True, eq=False)
class _Batch:
    """Partitions that are read by one submission."""

    params: list[Any]
    reads: PendingRecords


class ParameterSwapper:
    """Writes partitions to a swap file and brings them back, for one model.

    Made by ``deepspeed.zero.Init``. Its methods are those that DeepSpeed calls on
    ``AsyncPartitionedParameterSwapper``, with the same contracts. Thread-safe.
    """

    def __init__(self, ds_config: Any, model_dtype: torch.dtype) -> None:
        """Make the folder and the file below the configuration's ``nvme_path``.

        Raises:
            StorageError: they cannot be made; the message names ``nvme_path``.
            ConfigError: the section ``"peftds_ext"`` or ``PEFTDS_IO_FAULTS`` is not valid.
        """
        from deepspeed import comm
        from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

        self._status = PartitionedParamStatus
        self._lock = threading.RLock()
        self._reading: dict[int, _Batch] = {}  # by parameter
        self._exposed: set[int] = set()
        self.when_changed: Callable[[Any], None] = lambda param: None
        """Is told of each parameter whose bytes on the disk are going to be other than they were."""
        raw: Mapping[str, Any] = ds_config._param_dict
        root = Path(ds_config.zero_config.offload_param.nvme_path).absolute()
        self._item_bytes = model_dtype.itemsize
        self._threshold = max(_MIN_SWAPPED_BYTES, int(ds_config.aio_config["block_size"]))
        self._budget = memory_budget(raw, self._item_bytes)
        section = read_section(raw)
        settings = choose_settings(section.io, root, raw.get("aio"))
        self._engine = StorageEngine(settings, accelerator.page_lock())
        rank, ranks = comm.get_rank(), comm.get_world_size()
        engine = self._engine
        self._records = Records(engine, lambda: _swap_file(root, engine, rank, ranks))
        if section.params.source != "checkpoint":  # there it may be that nothing is ever written
            self._records.make_file()
        weakref.finalize(self, self._records.close)

    # -- which partitions are swapped, and their first write ------------------------------------------

    def swappable_tensor(self, param: Any = None, numel: int | None = None) -> bool:
        """Tell whether a partition is large enough to be kept on the disk."""
        elements: int = param.ds_tensor.ds_numel if numel is None else numel
        return elements * self._item_bytes >= self._threshold

    def has(self, param: Any) -> bool:
        """Tell whether a partition of this parameter is kept on the disk."""
        return str(getattr(param.ds_tensor.final_location, "value", "")) == "nvme"

    def get_buffer(self, param: Any, numel: int) -> Tensor:
        """Return memory for a partition that is going to be written for the first time."""
        return self._engine.empty(numel, param.dtype)

    def swap_out_and_release(
        self, params: Sequence[Any], async_op: bool = False, force_buffer_release: bool = False
    ) -> None:
        """Write partitions that differ from what is on the disk, and give their memory back.

        Raises:
            StorageError: a write failed; that partition stays AVAILABLE in memory.
        """
        with self._lock:
            for param in params:
                key, tensor = _key(param), param.ds_tensor.data
                # A gather with a modifier rank ends here even when nothing was modified.
                if not self._records.holds(key, tensor):
                    self._write(param, tensor)
                self._drop(param)

    # -- residency ------------------------------------------------------------------------------------

    def swap_in(
        self, params: Sequence[Any], async_op: bool = True, swap_in_buffers: Sequence[Tensor] | None = None
    ) -> None:
        """Bring partitions into memory; with ``async_op`` start to, as far as the memory budget allows.

        Partitions that are there or on their way are left as they are. Without ``async_op`` all that was
        on its way is there at the end, as DeepSpeed expects.

        Raises:
            StorageError: a read failed (CorruptDataError: other bytes are there than were written).
        """
        with self._lock:
            wanted = [p for p in params if not async_op or self._has_room(p)]
            self._start(wanted, ahead=async_op)
            if not async_op:
                self.synchronize_reads()

    def synchronize_reads(self) -> None:
        """Wait for all reads that are under way; those partitions become AVAILABLE.

        Raises:
            StorageError: a read failed. Its partitions are NOT_AVAILABLE again, and no read is left waiting.
        """
        with self._lock:
            failure: BaseException | None = None
            while self._reading:
                try:
                    self._finish(next(iter(self._reading.values())))
                except BaseException as error:
                    failure = failure or error
            if failure is not None:
                raise failure

    def synchronize_writes(self) -> None:
        """Return at once: writes are over when the methods that make them return."""

    def remove_partition_and_release_buffers(self, params: Sequence[Any]) -> None:
        """Drop partitions from memory; their memory goes back when nobody holds a view of it.

        Those that are not on the disk stay: memory is all that they have.
        """
        with self._lock:
            for param in params:
                if self.has(param):
                    self._drop(param)

    def available_swap_in_buffers(self) -> int:
        """Return how many partitions DeepSpeed's read-ahead may ask for; :meth:`swap_in` counts bytes."""
        return 1 << 20

    def swap_into_buffer(self, param: Any, dest_buffer: Tensor) -> None:
        """Read a partition into foreign memory, of any dtype and device; it stays on the disk as well.

        Raises:
            StorageError: the read failed.
        """
        with self._lock:
            self._forget_read(param)
            ready_for_reads = dest_buffer.device.type == "cpu" and dest_buffer.is_contiguous()
            if ready_for_reads and dest_buffer.dtype == param.ds_tensor.dtype:
                self._records.read_into(_key(param), dest_buffer)
            else:
                dest_buffer.copy_(self._records.fetch(_key(param)))

    # -- whole layers, which a pipeline reads ------------------------------------------------------------

    @property
    def engine(self) -> StorageEngine:
        """What moves the bytes."""
        return self._engine

    def bind(self, param: Any, source: Source) -> None:
        """Let a partition be what lies in a file that is only read.

        Raises:
            ValueError: it cannot be used in place.
        """
        self._records.bind(_key(param), source)

    def source(self, param: Any) -> Source:
        """Return where a partition lies now.

        Raises:
            StorageError: its last write failed.
        """
        return self._records.source(_key(param))

    def is_absent(self, param: Any) -> bool:
        """Tell whether a partition is on the disk alone, and not on its way either."""
        return bool(param.ds_tensor.status == self._status.NOT_AVAILABLE)

    def check(self, param: Any, tensor: Tensor) -> None:
        """Compare what was read through :meth:`source`, as the policy of checksums says.

        Raises:
            CorruptDataError: other bytes are there than were written.
        """
        self._records.arrived(_key(param), tensor)

    def adopt(self, param: Any, tensor: Tensor) -> None:
        """Make a partition AVAILABLE that was read through :meth:`source`.

        Raises:
            CorruptDataError: other bytes are there than were written.
        """
        self.check(param, tensor)
        with self._lock:
            if self.is_absent(param):
                param.ds_tensor.data = tensor
                param.ds_tensor.status = self._status.AVAILABLE

    def bring(self, params: Sequence[Any]) -> None:
        """Make these partitions AVAILABLE, and wait for no others.

        Raises:
            StorageError: a read failed. What was to come with it is NOT_AVAILABLE again.
        """
        with self._lock:
            self._start(params, ahead=False)
            for param in params:
                batch = self._reading.get(param.ds_id)
                if batch is not None:
                    self._finish(batch)

    @property
    def written_bytes(self) -> int:
        """Bytes of the disk that partitions take, beside those that lie in place in somebody else's file."""
        return self._records.written_bytes

    # -- trainable partitions that do not fit max_in_cpu ----------------------------------------------

    def reserve_partitioned_swap_space(self, partition_num_elems: Sequence[int]) -> None:
        """Return at once: partitions are written from memory of their exact size."""

    def swap_out_partitioned_params(
        self, dst_fp16_params: Sequence[Any], src_fp32_params: Sequence[Tensor]
    ) -> None:
        """Cast updated masters to their partitions' dtype and write them.

        Raises:
            StorageError: a write failed.
        """
        with self._lock:
            for param, source in zip(dst_fp16_params, src_fp32_params, strict=True):
                target = self.staging(source.numel(), param.ds_tensor.dtype)
                target.copy_(source)
                self.update_partition(param, target)

    def staging(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory for partitions that are about to be written."""
        return self._engine.empty(numel, dtype)

    def update_partition(self, param: Any, values: Tensor) -> None:
        """Give a partition new values, of its dtype, wherever it is now.

        Raises:
            StorageError: a write failed.
        """
        with self._lock:
            self._forget_read(param)
            if param.ds_tensor.status == self._status.AVAILABLE:
                param.ds_tensor.data.copy_(values)
            if self.has(param):
                self._write(param, values)

    # -- checkpoints ----------------------------------------------------------------------------------

    def expose(self, param: Any) -> None:
        """Let a partition's ``data`` be its bytes on the disk until :meth:`cover`; the status stays.

        Raises:
            StorageError: its last write failed, or other bytes are there than were written.
        """
        with self._lock:
            self._forget_read(param)
            param.ds_tensor.data = self._records.mapped(_key(param))
            self._exposed.add(param.ds_id)

    def cover(self, param: Any, *, keep_changes: bool) -> None:
        """End :meth:`expose`; with ``keep_changes`` what was written into ``data`` goes to the disk.

        Raises:
            StorageError: a write failed.
        """
        with self._lock:
            self._exposed.discard(param.ds_id)
            if keep_changes and not self._records.holds(_key(param), param.ds_tensor.data):
                self._write(param, param.ds_tensor.data)
            self._drop(param)

    # -- -----------------------------------------------------------------------------------------------

    def _write(self, param: Any, tensor: Tensor) -> None:
        self.when_changed(param)
        self._records.write(_key(param), tensor)

    def _start(self, params: Sequence[Any], *, ahead: bool) -> None:
        """Start reading those partitions that are neither there nor on their way."""
        absent = [p for p in params if p.ds_tensor.status == self._status.NOT_AVAILABLE]
        if not absent:
            return
        batch = _Batch(absent, self._records.fetch_all([_key(param) for param in absent], ahead=ahead))
        for param in absent:
            self._reading[param.ds_id] = batch
            param.ds_tensor.status = self._status.INFLIGHT

    def _finish(self, batch: _Batch) -> None:
        """Wait for a batch; those of its partitions that were forgotten meanwhile stay as they are."""
        tensors: Sequence[Tensor | None] = [None] * len(batch.params)
        try:
            tensors = batch.reads.wait()
        finally:
            for param, tensor in zip(batch.params, tensors, strict=True):
                if self._reading.get(param.ds_id) is not batch:
                    continue
                del self._reading[param.ds_id]
                if tensor is None:
                    param.ds_tensor.status = self._status.NOT_AVAILABLE
                else:
                    param.ds_tensor.data = tensor
                    param.ds_tensor.status = self._status.AVAILABLE

    def _has_room(self, param: Any) -> bool:
        """Whether reading this partition ahead stays within the budget; without one there is no limit."""
        needed = param.ds_tensor.ds_numel * param.ds_tensor.dtype.itemsize
        return self._budget is None or self._engine.arena.usage().live + needed <= self._budget

    def _forget_read(self, param: Any) -> None:
        """Let a read-ahead come to nothing: what it brings is about to be out of date, or not needed."""
        started = self._reading.pop(param.ds_id, None)
        if started is not None:
            param.ds_tensor.status = self._status.NOT_AVAILABLE

    def _drop(self, param: Any) -> None:
        self._forget_read(param)
        param.ds_tensor.status = self._status.NOT_AVAILABLE
        if param.ds_id in self._exposed:  # gathered and let go while a checkpoint is saved or loaded
            param.ds_tensor.data = self._records.mapped(_key(param))
        else:
            with torch.inference_mode(False):
                # Not by a factory of torch's: zero.Init lets these choose another device and dtype.
                param.ds_tensor.data = param.ds_tensor.data[:0].clone()


def _swap_file(root: Path, engine: StorageEngine, rank: int, ranks: int) -> SwapFile:
    folder = StoreFolder.create(root, rank=rank, what=NVME_PATH)
    try:
        file = SwapFile(folder, engine, rank=rank, world_size=ranks)
    except BaseException:
        folder.remove()
        raise
    logger.info("parameters on disk: %s, engine %s", file.path, engine.method)
    return file


def _key(param: Any) -> str:
    return f"param{param.ds_id}"
