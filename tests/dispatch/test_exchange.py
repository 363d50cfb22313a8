"""Tensors that travel between ranks as bytes come back with the same bits."""

import pytest
import torch

from moe_fast.dispatch.exchange import as_bytes, from_bytes

COLUMN = torch.arange(5.0)[None].T  # contiguous, although its last stride is 5
PARTS = [
    COLUMN,
    COLUMN[:, 0],
    torch.arange(12.0).reshape(3, 2, 2).mT,
    torch.zeros(0, 3),
    torch.zeros(4, 0),
    torch.arange(6).reshape(2, 3),
    -COLUMN.half(),
]


@pytest.mark.parametrize("rows", PARTS, ids=lambda x: f"{tuple(x.shape)} {tuple(x.stride())}")
def test_rows_come_back_from_bytes(rows):
    encoded = as_bytes(rows)
    assert encoded.shape == (len(rows), rows[:1].numel() * rows.element_size() if len(rows) else 12)
    decoded = from_bytes(encoded, rows)
    assert decoded.dtype == rows.dtype
    assert torch.equal(decoded, rows)


def test_the_column_has_the_stride_that_this_is_about():
    assert COLUMN.stride() == (1, 5)
    assert COLUMN.is_contiguous()
