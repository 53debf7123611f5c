"""A tensor-parallel MLP: matmuls that overlap with their communication.

    tdx run -n 4 examples/04_tensor_parallel_mlp.py

    y = gelu(x . w_up) . w_down

Each rank holds a slice of the rows (tokens) of x, of the columns of w_up and of the rows of w_down.
`AllGatherMatmul` multiplies rows of peers while others are still on their way;
`MatmulReduceScatter` sends finished tiles to their owners while it computes the next ones. No rank
ever holds the whole of w_up or w_down, and y comes back split over the ranks as x was.

Plans do checks, memory and compilation once. Their calls can be recorded in a graph and replayed.
"""

from __future__ import annotations

import math

import numpy as np

import tdx

TOKENS_PER_RANK, HIDDEN, INNER_PER_RANK = 32, 64, 48


def reference(x: np.ndarray, w_up: np.ndarray, w_down: np.ndarray) -> np.ndarray:
    """The MLP in float64."""
    z = x.astype(np.float64) @ w_up
    erf = np.vectorize(math.erf)
    return 0.5 * z * (1.0 + erf(z / math.sqrt(2.0))) @ w_down


def main() -> None:
    with tdx.init() as world:
        size, rank = world.size, world.rank
        rng = np.random.default_rng(2)  # the same numbers on every rank
        x = rng.standard_normal((size * TOKENS_PER_RANK, HIDDEN), np.float32)
        w_up = rng.standard_normal((HIDDEN, size * INNER_PER_RANK), np.float32) / HIDDEN**0.5
        w_down = rng.standard_normal((size * INNER_PER_RANK, HIDDEN), np.float32) / HIDDEN**0.5

        mine = world.array(np.split(x, size)[rank], symmetric=False)
        up = world.array(np.split(w_up, size, axis=1)[rank], symmetric=False)
        down = world.array(np.split(w_down, size)[rank], symmetric=False)

        first = tdx.AllGatherMatmul(world, mine.shape, up.shape, mine.dtype, activation="gelu")
        inner = (size * TOKENS_PER_RANK, INNER_PER_RANK)
        second = tdx.MatmulReduceScatter(world, inner, down.shape, mine.dtype)

        y = second(first(mine, up), down)
        expected = np.split(reference(x, w_up, w_down), size)[rank]
        error = np.abs(y.numpy() - expected).max()
        assert error < 1e-4, error

        with tdx.graph(world) as graph:
            y = second(first(mine, up), down)
        mine.copy_from(2 * np.split(x, size)[rank])  # a replay reads what is there now
        graph.replay()
        expected = np.split(reference(2 * x, w_up, w_down), size)[rank]
        replay_error = np.abs(y.numpy() - expected).max()
        assert replay_error < 1e-4, replay_error

        print(f"rank {rank}: y {y.shape}, error {error:.1e}, after graph replay {replay_error:.1e}")


if __name__ == "__main__":
    main()
