"""A GPU that is emulated in host memory, so that what only GPUs have is tested without one.

For torch, the tensors of this device are on ``cuda:0``: they do not mix with those of the CPU, and the host
cannot read them; random numbers come from a generator of the device; autograd has a thread for the device;
memory is counted. All code of the project that runs on GPUs therefore runs unchanged, whole clusters
included. The CPU's kernels compute (``device.cpp``), and work is complete when it is given
(``sitecustomize.py``), so that speed, and mistakes of streams, are not emulated; for the latter there is
``tests/helpers/late_device.py``. NCCL between processes is emulated over gloo (``emulated_nccl.py``).

``python -m tests.helpers.emulated_gpu COMMAND ...`` runs a command for which there is this GPU: one for each
process.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils import cpp_extension

from tests.helpers.emulated_gpu.sitecustomize import LIBRARY

HERE = Path(__file__).parent
SOURCE = HERE / "device.cpp"


def compiled() -> Path:
    """Return the device's library, compiled for this version of torch and kept in the virtual environment.

    :raises RuntimeError: if it cannot be compiled.
    """
    version = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = Path(sys.prefix) / "emulated_gpu" / f"{version}.so"
    if library.exists():
        return library
    if (compiler := shutil.which("c++")) is None:
        raise RuntimeError("there is no C++ compiler: install one (as root: apt-get install g++)")
    library.parent.mkdir(exist_ok=True)
    made = library.with_suffix(f".{os.getpid()}")
    folders = cpp_extension.library_paths()
    command = [
        *(compiler, "-std=c++20", "-O1", "-shared", "-fPIC"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{folder}" for folder in cpp_extension.include_paths()),
        str(SOURCE),
        *(f"-L{folder}" for folder in folders),
        *("-lc10", "-ltorch_cpu", "-ltorch"),
        *(f"-Wl,-rpath,{folder}" for folder in folders),
        *("-o", str(made)),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the emulated GPU cannot be compiled: {done.stderr}")
    made.replace(library)
    return library


def environment(gpus: int = 1) -> dict[str, str]:
    """Return this process's environment with emulated GPUs, and with tests that use them."""
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        LIBRARY: str(compiled()),
        "FTD_EMULATED_GPUS": str(gpus),
        "PYTHONPATH": os.pathsep.join(paths),
        "FTD_TEST_DEVICE": "cuda",
        "FTD_HEALTH_ENABLED": "false",  # The check of a GPU takes a CPU half a minute.
    }
