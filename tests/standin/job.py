"""Runs scenarios: `python -m tests.standin.job NAME...`, alone or under mpirun.

Prints a line of JSON for each scenario and rank, and ends with the first that fails.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

from tests.standin import (  # noqa: F401  # declare their scenarios
    contexts,
    ends,
    exchange,
    failures,
    foreign,
    foreign_copies,
    launching,
    library,
    ordering,
    products,
    sharing,
    threads,
    triton_hooks,
    use,
)
from tests.standin.ranks import SCENARIOS, Rank


def main(names: list[str]) -> None:
    rank = Rank()
    for name in names:
        text = ""
        try:
            SCENARIOS[name](rank)
        except BaseException:
            text = traceback.format_exc()
        line = json.dumps({"scenario": name, "rank": rank.rank, "failure": text})
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        if text:
            os._exit(1)  # the other ranks may wait, and later scenarios start from the ruins
    rank.meet()


if __name__ == "__main__":
    main(sys.argv[1:])
