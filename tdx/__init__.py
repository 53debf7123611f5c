"""tdx: framework-neutral distributed Triton kernels.

Ranks start with MPI, share symmetric memory, and run stock-Triton kernels that read, write and
signal each other's memory inside the kernel. See README.md and docs/architecture.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tdx.runtime import errors
from tdx.runtime.config import config

if TYPE_CHECKING:
    from tdx.kernels import *  # noqa: F403
    from tdx.runtime.array import Array
    from tdx.runtime.graph import graph
    from tdx.runtime.init import init
    from tdx.runtime.world import World

__version__ = "0.1.0"

# where each public name lives; loaded when first used, so that `import tdx` stays cheap
_HOMES = {
    "AllGather": "tdx.kernels.all_gather",
    "AllGatherMatmul": "tdx.kernels.all_gather_matmul",
    "AllReduce": "tdx.kernels.all_reduce",
    "Array": "tdx.runtime.array",
    "Barrier": "tdx.kernels.barrier",
    "MatmulReduceScatter": "tdx.kernels.matmul_reduce_scatter",
    "World": "tdx.runtime.world",
    "all_gather": "tdx.kernels.all_gather",
    "all_gather_matmul": "tdx.kernels.all_gather_matmul",
    "all_reduce": "tdx.kernels.all_reduce",
    "barrier": "tdx.kernels.barrier",
    "graph": "tdx.runtime.graph",
    "init": "tdx.runtime.init",
    "matmul": "tdx.kernels.matmul",
    "matmul_reduce_scatter": "tdx.kernels.matmul_reduce_scatter",
    "language": "tdx.language",
}

__all__ = ["__version__", "config", "errors", *_HOMES]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tdx' has no attribute {name!r}")
    module = importlib.import_module(home)
    value = module if home.endswith(f".{name}") and name == "language" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES))
