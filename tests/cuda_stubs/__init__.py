"""Two stub libraries, over which torch_memory_saver's own preload library runs without a GPU.

*Real hook, stubbed CUDA*: what decides whether an allocation is tracked is the wheel's library as it is; what it calls
of CUDA is this process's own memory. Needs a C compiler.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

HERE = Path(__file__).parent


def build(folder: Path) -> dict[str, str]:
    """Compile the stubs into a folder; returns the environment for a process that is to run under the hook.

    Raises:
        FileNotFoundError: There is no C compiler: install one, or name it in ``CC``.
    """
    versions = folder / "versions.map"
    versions.write_text("libcudart.so.13 { global: *; };\n")
    driver, runtime = folder / "libcuda.so.1", folder / "libcudart.so.13"
    compiler = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", "-pthread"]
    own_name = "-Wl,-soname,{}".format
    subprocess.run([*compiler, own_name(driver.name), "-o", driver, HERE / "libcuda.c"], check=True)
    subprocess.run(
        [
            *(*compiler, own_name(runtime.name), f"-Wl,--version-script={versions}"),
            *("-o", runtime, HERE / "libcudart.c", driver),
        ],
        check=True,
    )
    return {
        "LD_LIBRARY_PATH": str(folder),
        "LD_PRELOAD": str(_preload_library()),
        "TMS_INIT_ENABLE": "1",
        "RAY_AUTH_MODE": "disabled",
    }


def _preload_library() -> Path:
    import torch_memory_saver

    (library,) = Path(torch_memory_saver.__file__).parent.parent.glob("torch_memory_saver_hook_mode_preload_cu13*.so")
    return library
