"""Operands that share memory without looking so: each is refused, or the result is right."""

from __future__ import annotations

import numpy as np
import pytest

import tdx
from tdx.runtime.errors import InvalidArgument
from tests.helpers.cases import host_only, worlds
from tests.helpers.reference import assert_same_bits, values
from tests.ranks.cases.registration import by_memfd


@worlds(2, 3)
def case_both_addresses_of_registered_memory(world, backend):
    """The owner's array as input, the registered one as result: it is in place."""
    host_only(backend)
    each = 600
    count = each * world.size
    theirs = by_memfd(4 * count).view(np.float32)
    registered = world.register(theirs)
    plan = tdx.AllToAll(world, count, "float32", algorithm="push", buffer=False)
    for turn in range(4):
        given = [values(rank, count, "float32", turn) for rank in range(world.size)]
        registered.copy_from(given[world.rank])
        world.barrier()
        plan(theirs, registered) if turn % 2 else plan(registered, theirs)
        mine = slice(each * world.rank, each * (world.rank + 1))
        assert_same_bits(registered.numpy(), np.concatenate([g[mine] for g in given]), turn)
        world.barrier()
    with pytest.raises(InvalidArgument, match="overlaps x"):
        tdx.AllGather(world, each, "float32")(theirs[1 : 1 + each], registered)
    world.synchronize()
    world.barrier()
    registered.free()


@worlds(1, 2)
@pytest.mark.parametrize("algorithm", ["fused", "one_kernel", "unfused"])
def case_results_over_what_a_later_product_reads(world, algorithm):
    shape, side = (16, 16), world.size * 16
    a = world.array(values(world.rank, shape, "float32"))
    b = [world.array(values(i, (16, 16), "float32"), symmetric=False) for i in range(2)]
    outs = [world.zeros((side, 16), "float32", symmetric=False) for _ in range(2)]
    vectors = [outs[0][0], b[1][0]]
    plan = tdx.AllGatherMatmul(
        world, shape, ((16, 16), (16, 16)), "float32", algorithm=algorithm, bias=True
    )
    with pytest.raises(InvalidArgument, match="read while it is written"):
        plan(a, b, outs, bias=vectors[::-1])
    with pytest.raises(InvalidArgument, match="read while it is written"):
        plan(a, [b[0], outs[0][:16]], outs, bias=[b[0][0], b[1][0]])
    plan(a, b, outs, bias=[b[0][0], b[1][0]])
    rows = plan.gathered()
    for again in (lambda: plan(a, [rows[:16], b[1]], outs, bias=[b[0][0], b[1][0]]),
                  lambda: plan(a, b, [rows, outs[1]], bias=[b[0][0], b[1][0]])):  # fmt: skip
        with pytest.raises(InvalidArgument, match="lies in the plan's gathered rows"):
            again()
    world.barrier()


@worlds(1, 2, 3)
def case_inputs_in_the_buffer_that_peers_write_to(world):
    count = 3000
    plan = tdx.AllReduce(world, count, "float16", out_dtype="float32", algorithm="two_shot")
    x = world.array(np.ones(count, np.float16))
    buffer, out = plan(x), world.empty(count, "float32", symmetric=False)
    with pytest.raises(InvalidArgument, match="they must be apart"):
        plan(buffer.view("float16")[:count], out)
    assert (plan(x, out).numpy() == world.size).all()
    same = tdx.AllReduce(world, count, "float32", algorithm="two_shot")
    again = same(same(out), out)  # the whole buffer is as good as any input
    assert (again.numpy() == world.size**3).all()
