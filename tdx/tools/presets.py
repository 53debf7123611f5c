"""Shapes that the benches of products are run with: `tdx bench OPERATION --preset NAME`.

A shape is M, N, K of one rank's product. M counts the rows of all ranks. N of `all_gather_matmul`
is one rank's part of the columns, K of `matmul_reduce_scatter` and `matmul_all_reduce` its part of
the depth. `all_reduce_rms_norm` has M, N.
"""

from __future__ import annotations

from collections.abc import Sequence

from tdx.runtime.errors import InvalidArgument

__all__ = ["PRESETS", "given", "preset"]

_GATHERED = "all_gather_matmul"
_ROWS_ARE_SPLIT = (_GATHERED, "matmul_reduce_scatter")
_NORM = "all_reduce_rms_norm"

# hidden, inner, query heads, key and value heads; heads have 128 elements
_LLAMA = {
    "llama3-8b": (4096, 14336, 32, 8),
    "llama3-70b": (8192, 28672, 64, 8),
    "llama3-405b": (16384, 53248, 128, 8),
}
_HEAD = 128
_LLAMA_ROWS = tuple(1 << n for n in range(15))  # one token to 16384
# M and two extents of a layer, of which the first is one rank's part
_PARTS = {
    "default": ((2048, 7168, 4096), (4096, 7168, 8192), (8192, 7168, 8192)),
    "symm-mem-recipes": tuple(
        (m, *layer)
        for layer in ((1792, 4096), (3584, 8192), (6656, 16384))
        for m in (4096, 8192, 16384)
    ),
    "tiny": ((8, 48, 64), (12, 40, 72)),
}
# the same, where the last is split over the ranks
_WHOLE = {
    "amd": (
        (8192, 4096, 12288), (8192, 4096, 14336), (8192, 3584, 14336),
        (8192, 4608, 36864), (8192, 8192, 28672), (8192, 8192, 30720),
    ),
}  # fmt: skip
PRESETS = (*_PARTS, *_LLAMA, *_WHOLE)


def preset(name: str, operation: str, ranks: int) -> list[tuple[int, ...]]:
    """The shapes of preset `name` for one of `ranks` ranks.

    M is rounded up to a multiple of the ranks where each has a part of the rows, as frameworks pad
    it, and so are extents that are split.
    """
    shapes: list[tuple[int, ...]] = []
    for m, part, kept in _layers(name, operation, ranks):
        rows = -(-m // ranks) * ranks if operation in _ROWS_ARE_SPLIT else m
        if operation == _NORM:
            shapes.append((rows, kept))
        else:
            shapes.append((rows, part, kept) if operation == _GATHERED else (rows, kept, part))
    return list(dict.fromkeys(shapes))


def _layers(name: str, operation: str, ranks: int) -> list[tuple[int, int, int]]:
    """M, the extent of which a rank has a part, and the one that all ranks have whole."""
    if name in _PARTS:
        return list(_PARTS[name])
    if name in _WHOLE:
        return [(m, -(-split // ranks), kept) for m, kept, split in _WHOLE[name]]
    hidden, inner, heads, pairs = _LLAMA[name]
    if operation == _GATHERED:  # query, key and value; gate and up
        split = ((heads + 2 * pairs) * _HEAD, 2 * inner)
    else:  # what follows attention; down
        split = (heads * _HEAD, inner)
    return [(m, -(-extent // ranks), hidden) for extent in split for m in _LLAMA_ROWS]


def given(texts: Sequence[str], operation: str, ranks: int) -> list[tuple[int, ...]]:
    """The shapes that a user has written, each as M,N,K or M,N. Raises InvalidArgument."""
    axes = "M,N" if operation == _NORM else "M,N,K"
    shapes = []
    for text in texts:
        words = text.split(",")
        if len(words) != len(axes.split(",")) or not all(w.isdecimal() and int(w) for w in words):
            raise InvalidArgument(f"--shapes {text}: {operation} takes {axes}, each 1 or more")
        shape = tuple(int(word) for word in words)
        if operation in _ROWS_ARE_SPLIT and shape[0] % ranks:
            raise InvalidArgument(
                f"--shapes {text}: M={shape[0]} is no multiple of the {ranks} ranks of "
                f"{operation}; take {-(-shape[0] // ranks) * ranks}"
            )
        shapes.append(shape)
    return shapes
