"""Conversions in which every two settings meet, with kills and changes of the input, against a model in plain Python."""

from __future__ import annotations

import pathlib
import shutil
import sys

import convert_cases
import pytest

sys.path.append(str(pathlib.Path(__file__).parents[1] / "model"))
from pairwise import coverage, covering

pytest.importorskip("tokenizers")


@pytest.mark.slow
def test_every_two_settings_of_a_conversion(tmp_path: pathlib.Path) -> None:
    # Workers take seconds to start: scripts/chaos --conversions draws them too, and test_job.py kills some.
    options = {**convert_cases.OPTIONS, "workers": [1]}
    cases = covering(options, 0, convert_cases.valid)
    covered, possible = coverage(options, cases, convert_cases.valid)
    assert covered == possible
    failed = []
    for seed, case in enumerate(cases):
        try:
            convert_cases.play({**case, "seed": seed}, tmp_path / str(seed))
        except Exception as error:
            failed.append(f"{type(error).__name__}: {error}\n{convert_cases.script({**case, 'seed': seed})}")
        shutil.rmtree(tmp_path / str(seed))
    assert not failed, "\n".join(failed)
