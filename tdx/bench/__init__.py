"""Benchmarks, one module per operation: `tdx bench OPERATION`.

A module has `COLUMNS` (what its rows hold, in order) and `rows(bench)`, a generator of rows as
dictionaries; `bench` is a tdx.tools.bench.Bench. The first column tells what the operation takes:
"bytes" sizes, "M" shapes. `ALGORITHMS`, where there are any, are columns that only --all-algorithms
fills, see Bench.algorithms. `DTYPES`, where not all are taken, are the names of element types.
"""
