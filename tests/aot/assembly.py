"""Questions about PTX and AMD assembly."""

from __future__ import annotations

import re

_LABEL = re.compile(r"^([.$]L\w+):")
_BRANCH = re.compile(r"\b(?:bra(?:\.uni)?|s_c?branch\w*)\s+([.$]L\w+)")
_NO_FALL_THROUGH = re.compile(r"^\s*(?:bra(?:\.uni)?|s_branch|ret|s_endpgm)\b")


def instructions(code: str) -> list[str]:
    """Labels and instructions in the order of the text, without comments and directives."""
    comment = r"(//|;).*" if ".amdgcn_target" in code else r"//.*"
    lines = [re.sub(comment, "", line).strip() for line in code.splitlines()]
    body = [x for x in lines if x and (_LABEL.match(x) or not x.startswith((".", "$")))]
    return [x for x in body if not re.match(r"\.L(tmp|func)|\$L__(tmp|func)", x)]


def positions(code: str, pattern: str) -> list[int]:
    """Indices of the instructions that match."""
    return [i for i, line in enumerate(instructions(code)) if re.search(pattern, line)]


def in_order(code: str, *patterns: str) -> bool:
    """Do matches of the patterns follow each other in the text?"""
    lines, at = instructions(code), 0
    for pattern in patterns:
        found = [i for i in range(at, len(lines)) if re.search(pattern, lines[i])]
        if not found:
            return False
        at = found[0] + 1
    return True


def in_loop(code: str, pattern: str) -> bool:
    """Does control flow lead from some instruction that matches back to itself?"""
    lines = instructions(code)
    labels = {m.group(1): i for i, x in enumerate(lines) if (m := _LABEL.match(x))}

    def successors(i: int) -> list[int]:
        after = [labels[m.group(1)]] if (m := _BRANCH.search(lines[i])) else []
        if i + 1 < len(lines) and not _NO_FALL_THROUGH.match(lines[i]):
            after.append(i + 1)
        return after

    for start in positions(code, pattern):
        seen: set[int] = set()
        todo = successors(start)
        while todo:
            i = todo.pop()
            if i == start:
                return True
            if i not in seen:
                seen.add(i)
                todo += successors(i)
    return False
