"""An engine that torchrun starts: its key-value store as communicator, PyTorch's stream.

torchrun --nproc-per-node 4 examples/frameworks/engine_torch_store.py
"""

from itertools import count
from types import SimpleNamespace

import torch
import torch.distributed as dist
from layer import check, numbers, weights

import tdx

store, rank, size = next(dist.rendezvous("env://"))
number = count()


def allgather(payload):
    turn = next(number)
    store.set(f"tdx/{turn}/{rank}", payload)
    return [store.get(f"tdx/{turn}/{peer}") for peer in range(size)]


comm = SimpleNamespace(Get_rank=lambda: rank, Get_size=lambda: size, allgather=allgather)
with tdx.init(comm=comm) as world:
    stream = torch.cuda.Stream(world.device.index) if world.backend == "cuda" else world.stream
    x, (up, down) = world.array(numbers(size)[0]), map(world.array, weights(rank, size))
    partial = tdx.matmul(tdx.matmul(x, up, activation="relu", stream=stream), down, stream=stream)
    y = tdx.all_reduce(partial, stream=stream)
    check(y.numpy(), size)
    print(f"rank {rank}: y {y.shape} on {type(stream).__module__}'s stream", flush=True)
