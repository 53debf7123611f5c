"""tdx: framework-neutral distributed Triton kernels.

Ranks start with MPI, share symmetric memory, and run stock-Triton kernels that read, write and
signal each other's memory inside the kernel. See README.md and docs/architecture.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tdx import errors
from tdx.runtime.config import config

if TYPE_CHECKING:
    from tdx import language as language
    from tdx.kernels.all_gather import AllGather as AllGather
    from tdx.kernels.all_gather import all_gather as all_gather
    from tdx.kernels.all_gather_matmul import AllGatherMatmul as AllGatherMatmul
    from tdx.kernels.all_gather_matmul import all_gather_matmul as all_gather_matmul
    from tdx.kernels.all_reduce import AllReduce as AllReduce
    from tdx.kernels.all_reduce import all_reduce as all_reduce
    from tdx.kernels.barrier import Barrier as Barrier
    from tdx.kernels.barrier import barrier as barrier
    from tdx.kernels.matmul import matmul as matmul
    from tdx.kernels.matmul_reduce_scatter import MatmulReduceScatter as MatmulReduceScatter
    from tdx.kernels.matmul_reduce_scatter import matmul_reduce_scatter as matmul_reduce_scatter
    from tdx.runtime.array import Array as Array
    from tdx.runtime.graph import graph as graph
    from tdx.runtime.init import init as init
    from tdx.runtime.world import World as World

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
