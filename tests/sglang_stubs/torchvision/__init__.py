"""Stands in for torchvision, which SGLang imports for its image models.

The torchvision of the package index does not load beside the CPU build of torch, and no text model uses it. Every name
of it is here, down to any depth, and is good for being imported only.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

__version__ = "0.0"  # transformers asks for it, and takes nothing from a version that old


class _Missing:
    """Something of torchvision's; calling it raises."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("torchvision is a stand-in here (tests/sglang_stubs)")


def _name(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing()


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = _name


def __getattr__(name: str) -> Any:
    return _name(name)


sys.meta_path.append(_Submodules())
