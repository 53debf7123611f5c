"""Benchmarks, one module per operation: `tdx bench OPERATION`.

A module has `COLUMNS` (what its rows hold, in order) and `rows(bench)`, a generator of rows as
dictionaries; `bench` is a tdx.tools.bench.Bench. What cannot run yields its reason.
"""
