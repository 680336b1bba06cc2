"""The checks of :mod:`benchmarks.gpu_check` under torch_memory_saver's real hook, over stubbed CUDA.

``python -m tests.hooked_checks NAME FILE --on cuda`` runs one, as ``benchmarks.gpu_child`` does on a GPU. What a check
starts in a second process imports this, too, and is not under the hook.
"""

from __future__ import annotations

import sys

from benchmarks import gpu_child
from benchmarks.gpu_place import PLACES

if __name__ == "__main__":
    from tests.cuda_stubs import device
    from tests.cuda_stubs.place import StubGpuPlace, StubPlace

    device.install()
    PLACES["cuda"] = StubGpuPlace if "cuda_ipc" in sys.argv else StubPlace
    gpu_child.main()
