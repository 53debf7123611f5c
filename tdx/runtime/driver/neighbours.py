"""Libraries of this process that keep GPU memory to themselves, and how each lets go of it."""

from __future__ import annotations

import sys

__all__ = ["memory_remedies"]

_REMEDIES = {
    "jax": "JAX takes three quarters of a GPU at its first use: set "
    "XLA_PYTHON_CLIENT_PREALLOCATE=false, or a lower XLA_PYTHON_CLIENT_MEM_FRACTION, before",
    "torch": "PyTorch keeps what its tensors have freed: torch.cuda.empty_cache() gives it back, "
    "PYTORCH_CUDA_ALLOC_CONF=garbage_collection_threshold:0.6 and "
    "torch.cuda.set_per_process_memory_fraction limit it",
    "cupy": "CuPy keeps what its arrays have freed: "
    "cupy.get_default_memory_pool().free_all_blocks() gives it back, CUPY_GPU_MEMORY_LIMIT limits "
    "it",
}


def memory_remedies() -> str:
    """What to do where a GPU is full, for messages: of the libraries that are loaded here."""
    found = [text for name, text in _REMEDIES.items() if name in sys.modules]
    return "; ".join(found) or "see with `nvidia-smi` which other processes use the GPU"
