# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's methods of ZeRO-3 parameters, with something of ours done first.

They are attributes of each parameter (deepspeed/runtime/zero/partition_parameters.py,
``_convert_to_deepspeed_param``), through which everybody gathers and partitions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

Call = Callable[[Iterable[Any]], None]


def before_gathers(parameters: Iterable[Any], call: Call) -> None:
    """Let ``call`` be given those that are about to be gathered, through whichever of these parameters."""
    for parameter in parameters:
        parameter.all_gather = _gathering(call, parameter, parameter.all_gather)
        parameter.all_gather_coalesced = _gathering(call, parameter, parameter.all_gather_coalesced)


def before_updates(parameters: Iterable[Any], call: Call) -> None:
    """Let ``call`` be given those whose partitions are about to take over what was changed while gathered."""
    for parameter in parameters:
        parameter.partition = _partitioning(call, parameter, parameter.partition)


def _gathering(call: Call, parameter: Any, gather: Callable[..., Any]) -> Any:
    @functools.wraps(gather)
    def gathering(*args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.pop("param_list", kwargs.pop("params", None))
        parameters = [parameter] if given is None else list(given)
        call(parameters)
        return gather(parameters, *args[1:], **kwargs)

    return gathering


def _partitioning(call: Call, parameter: Any, partition: Callable[..., Any]) -> Any:
    @functools.wraps(partition)
    def partitioning(
        param_list: Any = None, hierarchy: int = 0, has_been_updated: bool = False, **options: Any
    ) -> Any:
        parameters = [parameter] if param_list is None else list(param_list)
        if has_been_updated:
            call(parameters)
        return partition(parameters, hierarchy, has_been_updated, **options)

    return partitioning
