"""Tells the local variables of a function whose present values it may still read, from its code.

    for step in session.steps(n):                # here:
        x = batches[step.index]                  # x is set before it is read: what it holds now is of no use
        queue = torch.cat([encode(x), queue])    # queue is read first

So a batch of the last step is told from what a loop keeps from step to step, whatever their sizes.
"""

from __future__ import annotations

import dis
from bisect import bisect_left, bisect_right
from functools import lru_cache
from types import CodeType, FrameType

_LOADS_AND_STORES = "STORE_FAST_LOAD_FAST"
_OF_SCRIPT = ("LOAD_NAME", "STORE_NAME", "DELETE_NAME")
_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE")
_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})


def read_later(frame: FrameType) -> frozenset[str]:
    """Names of variables that a function may read before it sets them, once its present call returns.

    A loop counts as one that has a next element. What only a handler of exceptions reads is left out. Of a
    script's own lines, which are in no function, what only a function reads is left out as well.
    """
    return _read_after(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=256)
def _read_after(code: CodeType, place: int) -> frozenset[str]:
    instructions = [*dis.get_instructions(code)]
    offsets = [one.offset for one in instructions]
    bits = {name: 1 << number for number, name in enumerate((*code.co_varnames, *code.co_names))}
    reads: list[int] = []
    sets: list[int] = []
    following: list[list[int]] = []
    for number, one in enumerate(instructions):
        read, written = _names_of(one)
        reads.append(sum(bits.get(name, 0) for name in {*read}))
        sets.append(sum(bits.get(name, 0) for name in {*written}))
        following.append(_following(number, one, offsets))
    before = [0] * len(instructions)
    todo = True
    while todo:  # backwards, until nothing more is found
        todo = False
        for number in reversed(range(len(instructions))):
            after = 0
            for other in following[number]:
                after |= before[other]
            if (now := reads[number] | (after & ~sets[number])) != before[number]:
                before[number], todo = now, True
    here = bisect_right(offsets, place) - 1  # it may point into the cache of an instruction
    found = 0
    ways = following[here] if here >= 0 else [0]
    for other in ways[:1] if here >= 0 and instructions[here].opname == "FOR_ITER" else ways:
        found |= before[other]
    shared = (*code.co_cellvars, *code.co_freevars)  # other functions may read them
    return frozenset((*(name for name, bit in bits.items() if found & bit), *shared))


def _names_of(one: dis.Instruction) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The local variables that an instruction reads, and those that it sets or deletes."""
    if "_FAST" not in one.opname and one.opname not in _OF_SCRIPT:
        return (), ()
    names: tuple[str, ...] = one.argval if isinstance(one.argval, tuple) else (str(one.argval),)
    if one.opname == _LOADS_AND_STORES:
        stored, loaded = names
        return (() if loaded == stored else (loaded,)), (stored,)
    return (names, ()) if one.opname.startswith("LOAD") else ((), names)


def _following(number: int, one: dis.Instruction, offsets: list[int]) -> list[int]:
    """Numbers of the instructions that may come next: the one behind it first."""
    jumps = one.opcode in _JUMPS
    unconditional = jumps and one.opname.startswith("JUMP") and "IF" not in one.opname
    ways = [] if unconditional or one.opname in _ENDS else [number + 1]
    if jumps:
        ways.append(bisect_left(offsets, one.argval))
    return [way for way in ways if way < len(offsets)]
