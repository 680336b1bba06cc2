"""Stands in for SGLang's kernels, so that SGLang can be imported on a machine without a GPU.

SGLang imports names from ``sgl_kernel`` while its modules load, also when it runs on a CPU, and the package index has
builds of it for CUDA only. On a CPU without AMX none of those kernels is called: SGLang takes torch's operators. So
what a test gets from an engine that runs over this stand-in is computed by SGLang and torch; a kernel that is called
after all raises, and so can never make a result up.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any


class _MissingKernel:
    """A kernel that is not there, or a name in it; calling it raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return _kernel(self._name, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name} was called, but sgl_kernel is a stand-in here (tests/sglang_stubs)")


def _kernel(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _MissingKernel(f"{module}.{name}")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``sgl_kernel.anything``, as a module whose every name is a missing kernel."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = lambda name: _kernel(module.__name__, name)


def __getattr__(name: str) -> Any:
    return _kernel(__name__, name)


sys.meta_path.append(_Submodules())
