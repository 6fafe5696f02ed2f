"""Values that 64-bit types hold and the devices' types do not."""

from __future__ import annotations

import numpy as np
import pytest

from meshfeed._src.arrays.dtypes import check_values
from meshfeed._src.base.errors import SourceError


@pytest.mark.parametrize(
    ("dtype", "value", "refused"),
    [
        (np.int64, 2**31 - 1, None),
        (np.int64, 2**31, "int32"),
        (np.int64, -(2**31), None),
        (np.int64, -(2**31) - 1, "int32"),
        (np.uint64, 2**32 - 1, None),
        (np.uint64, 2**32, "uint32"),
    ],
)
def test_integers_that_do_not_fit_are_refused_by_leaf_place_and_type(
    dtype: type[np.integer], value: int, refused: str | None
) -> None:
    batch = {"a": np.ones(3, np.int32), "b": [np.zeros((2, 3), dtype), np.zeros(0, dtype)]}
    batch["b"][0][1, 2] = value
    check_values(batch, x64=True)
    if refused is None:
        check_values(batch, x64=False)
        return
    message = rf"leaf \['b'\]\[0\] .* holds {value} at \(1, 2\), which does not fit in {refused} \("
    with pytest.raises(SourceError, match=message):
        check_values(batch, x64=False)
