"""CuPy: x and y split by rows; the products run while rows and tiles are on their way.

tdx run -n 4 examples/frameworks/cupy_layer.py
"""

import cupy
from layer import check, rows, weights

import tdx

with tdx.init(backend="cuda") as world, cupy.cuda.Device(world.device.index):
    x = cupy.asarray(rows(world.rank, world.size))
    up, down = map(cupy.asarray, weights(world.rank, world.size))
    with cupy.cuda.Stream(non_blocking=True):  # tdx works on CuPy's current stream
        inner = tdx.all_gather_matmul(x, up, activation="relu")  # x of all ranks, own columns
        y = tdx.matmul_reduce_scatter(inner, down)  # own rows
        check(y.get(), world.size, world.rank)  # CuPy's own copy waits for the stream
    print(f"rank {world.rank}: {type(y).__module__} {y.shape} on GPU {y.device.id}")
