"""Imported by each Python process that a test starts, if this folder is in PYTHONPATH: reports what the process calls."""

import os

if os.environ.get("MUTATION_CALLS_OF_CHILDREN") and os.environ.get("MUTANT_UNDER_TEST") == "stats":
    import mutmut.mutation.trampoline

    _known: set[str] = set()
    _file = os.open(os.environ["MUTATION_CALLS_OF_CHILDREN"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def _record(name: str, caller: str | None = None) -> None:
        if name not in _known:  # written at once, because the process may be killed
            _known.add(name)
            os.write(_file, f"{name}\n".encode())

    mutmut.mutation.trampoline.record_trampoline_hit = _record
