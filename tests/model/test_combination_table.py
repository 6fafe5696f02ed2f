"""The page on orders lists what works over what."""

from __future__ import annotations

import combination_table
import pytest


@pytest.mark.slow
def test_the_page_has_the_table_of_what_works() -> None:
    written = combination_table.PAGE.read_text().split(combination_table.BEGIN)[1].split(combination_table.END)[0]
    assert written.strip() == combination_table.table().strip(), "run python tests/model/combination_table.py"
