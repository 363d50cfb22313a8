"""Implementations that misbehave as a process, not as a function."""

import ctypes
import time
from pathlib import Path

import torch

from moe_ref.permutation.permute import permute


class Segfaults:
    """Reads from address 1 when more than two experts are asked for."""

    @staticmethod
    def permute(tokens, routing_map, *, probs=None):
        if routing_map.shape[1] > 2:
            ctypes.string_at(1)
        return permute(tokens, routing_map, probs=probs)


class Hangs:
    """Sleeps when some expert has no token at all."""

    @staticmethod
    def permute(tokens, routing_map, *, probs=None):
        if not bool((routing_map != 0).any(0).all()):
            time.sleep(3600)
        return permute(tokens, routing_map, probs=probs)


class WritesOutOfBounds:
    """Writes one element past its output when it has rows."""

    @staticmethod
    def permute(tokens, routing_map, *, probs=None):
        out = permute(tokens, routing_map, probs=probs)
        rows = torch.empty(out.rows.shape, dtype=out.rows.dtype)
        rows.copy_(out.rows.detach())
        if rows.numel():
            rows.as_strided((1,), (1,), rows.storage_offset() + rows.numel()).fill_(1)
        return out._replace(rows=rows)

    @staticmethod
    def declares(function):
        return {"differentiable": False}


class LeavesRowsUnwritten:
    """Does not write its last row when it has more than two."""

    @staticmethod
    def permute(tokens, routing_map, *, probs=None):
        out = permute(tokens, routing_map, probs=probs)
        rows = torch.empty(out.rows.shape, dtype=out.rows.dtype)
        written = len(rows) - (len(rows) > 2)
        rows[:written] = out.rows[:written].detach()
        return out._replace(rows=rows)

    @staticmethod
    def declares(function):
        return {"differentiable": False}


class Remembers:
    """Wrong for two experts once it has been called three times with one expert."""

    single = 0

    @classmethod
    def permute(cls, tokens, routing_map, *, probs=None):
        out = permute(tokens, routing_map, probs=probs)
        cls.single += routing_map.shape[1] == 1
        return out._replace(rows=out.rows + 1) if cls.single > 2 and routing_map.shape[1] == 2 else out


class WrongOnce:
    """Wrong for two experts once per working directory."""

    @staticmethod
    def permute(tokens, routing_map, *, probs=None):
        out = permute(tokens, routing_map, probs=probs)
        if routing_map.shape[1] != 2 or Path("wrong_once").exists():
            return out
        Path("wrong_once").touch()
        return out._replace(rows=out.rows + 1)
