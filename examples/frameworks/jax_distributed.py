"""JAX over the processes that MPI starts: parts of a global array in, parts of a global array out.

XLA_PYTHON_CLIENT_PREALLOCATE=false tdx run -n 4 examples/frameworks/jax_distributed.py
"""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from layer import check, numbers, rows, weights

import tdx

jax.distributed.initialize(cluster_detection_method="mpi4py")  # before any other call of JAX
with tdx.init() as world:
    platform = "cuda" if world.backend == "cuda" else "cpu"
    mesh = Mesh(jax.devices(platform), "ranks")  # one device of each process
    by_rows = NamedSharding(mesh, PartitionSpec("ranks"))
    x = jax.make_array_from_process_local_data(by_rows, rows(world.rank, world.size))
    device = jax.local_devices(backend=platform)[0]
    up, down = (jax.device_put(w, device) for w in weights(world.rank, world.size))
    inner = tdx.all_gather_matmul(x.addressable_shards[0].data, up, activation="relu")
    own = tdx.matmul_reduce_scatter(inner, down)  # a jax.Array on this process's device
    y = jax.make_array_from_single_device_arrays(numbers(world.size)[0].shape, by_rows, [own])
    check(jax.device_get(y.addressable_shards[0].data), world.size, world.rank)
    print(f"rank {world.rank}: {y.shape} over {len(mesh.devices)} devices, own part on {device}")
