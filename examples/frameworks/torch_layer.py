"""PyTorch, without torch.distributed: x and y split by rows.

tdx run -n 4 examples/frameworks/torch_layer.py
"""

import torch
from layer import check, rows, weights

import tdx

with tdx.init() as world, torch.no_grad():
    device = torch.device("cuda", world.device.index) if world.backend == "cuda" else "cpu"
    x = torch.from_numpy(rows(world.rank, world.size)).to(device)
    up, down = (torch.from_numpy(w).to(device) for w in weights(world.rank, world.size))
    inner = tdx.all_gather_matmul(x, up, activation="relu")  # on PyTorch's current stream
    y = tdx.matmul_reduce_scatter(inner, down)
    check(y.cpu().numpy(), world.size, world.rank)
    print(f"rank {world.rank}: {type(y).__module__} {tuple(y.shape)} on {y.device}")
