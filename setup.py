# SPDX-License-Identifier: Apache-2.0
"""Builds the compiled modules; everything else about the package stands in pyproject.toml.

``_core`` is always built. ``_cuda`` is built when torch is a CUDA build and a CUDA toolkit is found;
``FORCE_CUDA=1`` makes its absence an error and ``FORCE_CUDA=0`` leaves it out. ``MAX_JOBS``,
``CUDA_HOME`` and ``TORCH_CUDA_ARCH_LIST`` mean what they mean to every torch extension. io_uring is
built in when liburing is found; ``PEFTDS_URING=1`` makes its absence an error and ``PEFTDS_URING=0``
leaves it out.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pybind11
import torch
from setuptools import setup
from torch.utils import cpp_extension

CSRC = Path("csrc")
CORE_SOURCES = [
    "base/arena.cpp",
    "base/cpu_features.cpp",
    "base/crc32c.cpp",
    "base/page_lock.cpp",
    "base/thread_pool.cpp",
    "io/engine.cpp",
    "io/engine_core.cpp",
    "io/fault_plan.cpp",
    "io/faulty_transport.cpp",
    "io/file.cpp",
    "io/thread_transport.cpp",
    "io/uring_transport.cpp",
    "kernels/cpu/kernels.cpp",
    "kernels/cpu/scalar.cpp",
    "kernels/cpu/avx2.cpp",
    "kernels/cpu/avx512.cpp",
    "stream/executor.cpp",
    "bindings/bind_io.cpp",
    "bindings/bind_stream.cpp",
    "bindings/ops_cpu.cpp",
    "bindings/core_module.cpp",
]
CUDA_SOURCES = [
    "kernels/cuda/adam.cu",
    "kernels/cuda/build_info.cu",
    "kernels/cuda/cast.cu",
    "kernels/cuda/page_lock.cu",
    "kernels/cuda/squared_norm.cu",
    "bindings/ops_cuda.cpp",
    "bindings/cuda_module.cpp",
]
# The oldest torch whose stable ABI we use; one build then serves this and every later torch.
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"
# Error messages name sources as they are called here, not where they happened to be built.
SHORT_NAMES = f"-fmacro-prefix-map={Path.cwd()}/="
CXX_FLAGS = [
    SHORT_NAMES,
    "-O3",
    "-std=c++20",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Wall",
    STABLE_ABI,
]
NVCC_FLAGS = ["-O3", "-std=c++20", "-fmad=false", STABLE_ABI, "-DUSE_CUDA"]


def cuda_home() -> Path | None:
    """Return the toolkit's folder, or None; a wrapper script called nvcc is followed to the real one."""
    nvcc = shutil.which("nvcc")
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    candidates += [str(Path(nvcc).resolve().parent.parent)] if nvcc else []
    candidates += ["/usr/local/cuda"]
    for candidate in candidates:
        home = Path(candidate) if candidate else None
        if home and (home / "bin/nvcc").exists() and (home / "include/cuda_runtime.h").exists():
            return home
    return None


def why_no_cuda(home: Path | None) -> str:
    """Return why ``_cuda`` cannot be built with the toolkit in ``home``, or "" if it can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if home is None:
        return "no CUDA toolkit: neither CUDA_HOME, nor nvcc on the PATH, nor /usr/local/cuda leads to one"
    told = subprocess.run(
        [home / "bin/nvcc", "--version"], capture_output=True, text=True, check=False
    ).stdout
    release = re.search(r"release (\d+)\.", told)
    if release is None or release[1] != torch.version.cuda.split(".")[0]:
        have = release[1] if release else "of unknown version"
        return f"the CUDA toolkit in {home} is {have}, but torch is built for {torch.version.cuda}"
    return ""


def wants_cuda() -> bool:
    """Decide whether ``_cuda`` is built, say why not, and prepare what torch's builder reads."""
    forced = os.environ.get("FORCE_CUDA")
    if forced == "0":
        return False
    home = cuda_home()
    reason = why_no_cuda(home)
    if reason and forced == "1":
        sys.exit(f"peftds_ext: FORCE_CUDA=1, but {reason}")
    if reason:
        print(f"peftds_ext: CUDA kernels are left out: {reason}")
        return False
    os.environ["CUDA_HOME"] = cpp_extension.CUDA_HOME = str(home)
    if not torch.cuda.is_available():  # there is no GPU whose architecture torch could ask for
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    return True


def links_with(library: str) -> bool:
    """Tell whether a shared object that uses liburing can be linked with this linker argument."""
    program = (
        "#include <liburing.h>\nint probe() { io_uring ring; return io_uring_queue_init(1, &ring, 0); }\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        out = ["-shared", "-fPIC", "-o", f"{folder}/probe.so", library]
        command = [os.environ.get("CXX", "c++"), "-x", "c++", "-", *out]
        tried = subprocess.run(command, input=program, capture_output=True, text=True, check=False)
        return tried.returncode == 0


def uring_flags() -> tuple[list[str], list[str]]:
    """Return what to compile and to link with for io_uring: the static library where there is one."""
    wanted = os.environ.get("PEFTDS_URING")
    if wanted == "0":
        return [], []
    for library in ("-l:liburing.a", "-luring"):
        if links_with(library):
            return ["-DPEFTDS_WITH_URING"], [library]
    if wanted == "1":
        sys.exit("peftds_ext: PEFTDS_URING=1, but liburing was not found (on Debian: liburing-dev)")
    print("peftds_ext: io_uring is left out: liburing was not found (on Debian: liburing-dev)")
    return [], []


def extension(
    kind: type, name: str, sources: list[str], flags: dict[str, list[str]], link: Sequence[str] = ()
) -> object:
    """Describe one compiled module of ``peftds_ext._native``."""
    return kind(
        name=f"peftds_ext._native.{name}",
        sources=[str(CSRC / source) for source in sources],
        include_dirs=[str(CSRC.resolve()), pybind11.get_include()],
        extra_compile_args=flags,
        extra_link_args=list(link),
    )


uring_compile, uring_link = uring_flags()
core_flags = {"cxx": [*CXX_FLAGS, *uring_compile]}
extensions = [extension(cpp_extension.CppExtension, "_core", CORE_SOURCES, core_flags, uring_link)]
if wants_cuda():
    flags = {"cxx": [*CXX_FLAGS, "-DUSE_CUDA"], "nvcc": NVCC_FLAGS}
    extensions.append(extension(cpp_extension.CUDAExtension, "_cuda", CUDA_SOURCES, flags))

setup(ext_modules=extensions, cmdclass={"build_ext": cpp_extension.BuildExtension})
