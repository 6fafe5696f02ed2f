"""KeyboardInterrupt at a chosen point of meshfeed's own code."""

from __future__ import annotations

import dis
import functools
import gc
import pathlib
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import meshfeed

SOURCE = str(pathlib.Path(meshfeed.__file__).parent)


@functools.cache
def interruptible(code: types.CodeType) -> dict[int, bool]:
    """Offsets of the instructions before which CPython can raise KeyboardInterrupt; True for those right after a call.

    It handles signals when a function begins, at backward jumps, after calls, and inside calls that wait. Not inside the
    call that ends a ``with`` block: releasing a lock does not wait.
    """
    found: dict[int, bool] = {}
    names: list[str] = []
    after = after_call = False
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        ends_with = names[-3:] == ["LOAD_CONST"] * 3 or names[-4:] == ["LOAD_CONST"] * 3 + ["PRECALL"]
        is_call = name in ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "BEFORE_WITH", "JUMP_BACKWARD")
        if is_call and not (ends_with and instruction.arg == 2):
            found[instruction.offset] = False
        elif after:
            found[instruction.offset] = after_call
        after_call = name == "CALL"
        after = name in ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "RESUME")
        if name != "CACHE":
            names.append(name)
    return found


def is_ours(frame: Any) -> bool:
    """Whether meshfeed's code runs in this frame, or threading's for it: JAX's own locks would stay taken for ever."""
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(SOURCE)


def interrupted(call: Callable[[], object], point: int) -> bool:
    """Calls and raises KeyboardInterrupt at one point of meshfeed's own code; False if it has not so many."""
    left = point
    in_c: set[Any] = set()  # frames that call a C function
    returned: set[Any] = set()  # frames to which a Python function returns without a look for signals

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event == "c_call":
            in_c.add(frame)
        elif event in ("c_return", "c_exception"):
            in_c.discard(frame)

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal left
        # What a class or an instance calls, it calls from C.
        if (
            event == "call"
            and frame.f_back not in in_c
            and frame.f_code.co_name not in ("__init__", "__new__", "__call__")
        ):
            returned.add(frame.f_back)
        if not is_ours(frame):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            after_call = interruptible(frame.f_code).get(frame.f_lasti)
            if after_call is not None and not (after_call and frame in returned):
                left -= 1
                if left < 0:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            returned.discard(frame)
        return trace

    sys._getframe().f_trace_opcodes = True  # or Python 3.12 reports no bytecodes to the first tracer
    gc.disable()  # Python swallows an exception that is raised in a finalizer
    sys.setprofile(profile)
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    except StopIteration:
        pass
    finally:
        sys.settrace(None)
        sys.setprofile(None)
        gc.enable()
    return False
