"""JAX: compiled functions before and after, tdx between them, outside of jax.jit.

XLA_PYTHON_CLIENT_PREALLOCATE=false tdx run -n 4 examples/frameworks/jax_layer.py
"""

import jax
from layer import check, numbers, weights

import tdx


@jax.jit
def own_part(x, up, down):
    return jax.nn.relu(x @ up) @ down


with tdx.init() as world:
    on_gpu = world.backend == "cuda"
    device = jax.devices("cuda")[world.device.index] if on_gpu else jax.devices("cpu")[0]
    jax.config.update("jax_default_matmul_precision", "highest")
    x = jax.device_put(numbers(world.size)[0], device)
    up, down = (jax.device_put(w, device) for w in weights(world.rank, world.size))
    y = tdx.all_reduce(own_part(x, up, down))  # a jax.Array again; nobody's memory is changed
    check(jax.device_get(y), world.size)
    print(f"rank {world.rank}: {type(y).__module__} {y.shape} on {next(iter(y.devices()))}")
