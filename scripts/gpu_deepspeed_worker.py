# SPDX-License-Identifier: Apache-2.0
"""One DeepSpeed engine of gpu_deepspeed.py, in a process of its own: LoRA on a Llama with random weights.

Reads one command a line from standard input and answers each with one line of JSON on the standard output it
was started with; everything that libraries print goes to standard error.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent


def environment(on_cpu: bool) -> None:
    """Let DeepSpeed run alone, on the GPU or, for a rehearsal, on the CPU."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0"
    )
    # One way of computing for all: nothing is compiled at run time.
    os.environ.update(TORCHDYNAMO_DISABLE="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    if on_cpu:
        os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
        torch.set_num_threads(1)


def stand_in() -> Any:
    """Let layers be copied to a stand-in for a GPU; returns it."""
    from lazy_device import LazyDevice

    from peftds_ext import _native
    from peftds_ext.integrations.deepspeed import accelerator

    device = LazyDevice()
    accelerator.layer_device = lambda: device
    accelerator.page_lock = _native.core().mlock_page_lock
    return device


def llama(shape: dict[str, int], device: str) -> Any:
    """Return a bf16 Llama with LoRA, from Transformers and PEFT, or in plain torch where these are not."""
    if not all(importlib.util.find_spec(name) for name in ("transformers", "peft")):
        from gpu_streaming_models import Shape, build

        plain = Shape(shape["hidden"], shape["inner"], shape["layers"], shape["vocabulary"], shape["heads"])
        return build(plain, torch.device(device))
    import peft
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=shape["hidden"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["heads"],
        vocab_size=shape["vocabulary"],
        dtype=torch.bfloat16,
        use_cache=False,
    )
    with torch.device(device):
        base = transformers.AutoModelForCausalLM.from_config(config)
        lora = peft.LoraConfig(
            r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights=False
        )
        return peft.get_peft_model(base, lora, autocast_adapter_dtype=False).train()


class Training:
    """An engine, its batches and its losses."""

    def __init__(self, job: dict[str, Any]) -> None:
        """Build the engine that a job describes."""
        environment(job["stand_in"])
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        import peftds_ext

        self._kind: str = job["kind"]
        if self._kind == "stock":
            # Collectives in shared memory of CPUs, which it would compile first.
            collectives: Any = importlib.import_module("deepspeed.comm.torch")
            collectives.build_shm_op = lambda: None
        else:
            peftds_ext.install()
        self.device = stand_in() if job["stand_in"] and self._kind == "ours" else None
        self._accelerator = get_accelerator()
        if job["repeatable"]:
            torch.use_deterministic_algorithms(True, warn_only=True)
            deterministic: Any = torch.utils.deterministic
            deterministic.fill_uninitialized_memory = False
        shape = job["shape"]
        device = "cpu" if job["stand_in"] else f"cuda:{self._accelerator.current_device()}"
        model = llama(shape, device)
        if job["checkpointing"]:
            checkpoint(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=job["config"])
        if self.engine.zero_optimization_stage() == 3:  # the others may well be DeepSpeed's own
            _check_whose(self.engine.optimizer, ours=self._kind != "stock")
        if self._kind == "resident":
            for hook in self.engine.optimizer.parameter_offload.forward_hooks:
                hook.remove()
        self._batches = batches(shape, job["tokens"], device)
        self.losses: list[Tensor] = []

    def round(self) -> dict[str, float]:
        """Take one step."""
        batch = self._batches[len(self.losses) % len(self._batches)]
        self._wait()
        start = time.perf_counter()
        if self._kind == "resident":  # everything is there before anything runs
            parameters = list(self.engine.module.parameters())
            parameters[0].all_gather(parameters)
        loss = self._loss(batch)
        self.engine.backward(loss)
        self.engine.step()
        self._wait()
        seconds = time.perf_counter() - start
        self.losses.append(loss.detach())
        return {"step": seconds}

    def _wait(self) -> None:
        if not self._accelerator.is_synchronized_device():
            self._accelerator.synchronize()

    def _loss(self, batch: Tensor) -> Tensor:
        loss: Tensor
        if hasattr(self.engine.module, "config"):
            loss = self.engine(input_ids=batch, labels=batch).loss
        else:
            loss = self.engine(batch)
        return loss

    def result(self) -> dict[str, Any]:
        """Return what must be the same in all engines."""
        from deepspeed.utils import safe_get_full_fp32_param

        digest = hashlib.sha256()
        for name, parameter in self.engine.module.named_parameters():
            if parameter.requires_grad:
                whole = safe_get_full_fp32_param(parameter)
                digest.update(name.encode() + whole.detach().cpu().contiguous().numpy().tobytes())
        return {"losses": [float(loss) for loss in self.losses], "masters": digest.hexdigest()}

    def told(self) -> dict[str, Any]:
        """Return what the engine says of itself."""
        import peftds_ext

        stats = peftds_ext.stats(self.engine)
        fetch = self.engine.optimizer.parameter_offload.param_coordinator._fetch
        copies = fetch._copies()
        return {
            "text": str(stats),
            "stats": stats.model_dump(mode="json"),
            "counts": None if copies is None else vars(copies.counts),
            "late": getattr(self.engine.optimizer, "_peftds_late", None) is not None,
            "device_peak": self._peak(),
        }

    def _peak(self) -> int:
        if self.device is not None:
            return int(self.device.peak)
        return int(self._accelerator.max_memory_allocated())

    def close(self) -> None:
        """End the engine, and with it the trace."""
        self.engine.destroy()


def checkpoint(model: Any) -> None:
    """Let activations be computed again in the backward pass."""
    if hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.reentrant = False


def batches(shape: dict[str, int], tokens: int, device: str) -> list[Tensor]:
    """Return the same batches in every process."""
    generator = torch.Generator().manual_seed(3)
    size = (4, 1, tokens)
    return list(torch.randint(0, shape["vocabulary"], size, generator=generator).to(device))


def _check_whose(optimizer: nn.Module, *, ours: bool) -> None:
    found = any(base.__module__.startswith("peftds_ext.") for base in type(optimizer).__mro__)
    if found != ours:
        wanted = "our engine" if ours else "stock"
        raise RuntimeError(f"this worker is to run {wanted}, and got the optimizer {type(optimizer)!r}")


def serve(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Build the engine, and yield answers until standard input ends."""
    training = Training(job)
    yield {"ready": True}
    for line in sys.stdin:
        command = line.strip()
        if command == "round":
            yield {"phases": training.round()}
        elif command == "result":
            yield {"result": training.result()}
        elif command == "told":
            yield {"told": training.told()}
        elif command == "close":
            training.close()
            yield {"close": True}
        else:
            raise ValueError(f"unknown command {line!r}")


def main() -> None:
    """Serve commands until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", required=True, help="JSON")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "stream")]
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for answer in serve(json.loads(options.job)):
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
