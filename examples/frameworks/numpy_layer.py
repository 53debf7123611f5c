"""NumPy under an MPI launcher.

mpirun -n 4 python examples/frameworks/numpy_layer.py
"""

import numpy as np
from layer import check, numbers, weights

import tdx

with tdx.init() as world:
    x, _, _ = numbers(world.size)
    up, down = weights(world.rank, world.size)
    summand = np.maximum(x @ up, 0) @ down
    y = tdx.all_reduce(summand)  # a NumPy array again, complete when the call returns
    check(y, world.size)
    print(f"rank {world.rank}: {type(y).__module__} {y.shape}, the same on every rank")
