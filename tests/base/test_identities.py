"""Fields of identities, such as digests of all records, that states saved by earlier versions lack."""

from __future__ import annotations

from meshfeed._src.base.identities import as_saved, without_later

NESTED = {"kind": "mixture", "all_records": "m", "parts": {"a": {"n": 3, "all_records": "a"}, "b": {"n": 4}}, "of": [1]}


def test_they_are_taken_out_at_any_depth() -> None:
    bare, digests = without_later(NESTED)
    assert bare == {"kind": "mixture", "parts": {"a": {"n": 3}, "b": {"n": 4}}, "of": [1]}
    assert digests == ["m", "a"]


def test_those_that_the_saved_identity_has_are_kept() -> None:
    bare, _ = without_later(NESTED)
    assert as_saved(NESTED, NESTED) == NESTED
    assert as_saved(NESTED, bare) == bare
    assert as_saved(NESTED, {**bare, "all_records": "other"}) == {**bare, "all_records": "m"}
    assert as_saved(NESTED, {"parts": {"a": {"all_records": "x"}}})["parts"]["a"] == {"n": 3, "all_records": "a"}
    assert as_saved(NESTED, None) == NESTED
    assert as_saved(7, NESTED) == 7
