"""A checksum of memory that is the sum of the checksums of its parts: sender and receiver cut it in different ways.

A storage is read as 64-bit words; word k counts for its value times an odd number that is made of k, modulo 2**64. So
the sum over any disjoint parts, by whichever ranks, is that of the whole; one changed byte changes it for certain, and
words that have changed places do, too. What nobody sends counts as zero. torch only, on the device of the memory.

Not a defence against somebody who wants two contents to have one sum: it finds what went wrong on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch

from vllm_nixl_plugin.copies import Copy

MASK = (1 << 64) - 1
CHUNK_WORDS = 1 << 22
"""Words that are summed in one go; a multiple of it begins at the same factors wherever it is."""


def checksum(data: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """Of contiguous bytes (uint8, one dimension) that lie ``offset`` bytes into their storage; an int64 on the device.

    It is not waited for, so that those of many tensors are worked out one behind the other.
    """
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    head, tail = -offset % 8, (offset + data.numel()) % 8
    if data.numel() <= head + tail or data.numel() < 8:
        return total + _padded(data, offset)
    if head:
        total += _padded(data[:head], offset)
    if tail:
        total += _padded(data[data.numel() - tail :], offset + data.numel() - tail)
    words = _words(data[head : data.numel() - tail])
    first = (offset + head) // 8
    while words.numel():
        count = min(words.numel(), CHUNK_WORDS - first % CHUNK_WORDS)
        total += _product(words[:count], _factors(first, count, data.device))
        words, first = words[count:], first + count
    return total


def checksums(parts: Iterable[tuple[torch.Tensor, int]]) -> int:
    """The sum of the checksums of these parts and their offsets."""
    found = [checksum(data, offset) for data, offset in parts]
    return unsigned(sum(int(each) for each in found))


def unsigned(value: int) -> int:
    """As it is told: from 0 to 2**64 - 1."""
    return value & MASK


def written(data: torch.Tensor, copies: Sequence[Copy]) -> torch.Tensor:
    """The bytes of a storage that these copies write, and zero where they do not."""
    if sum(copy.dst_nbytes for copy in copies) == data.numel():  # each byte has one writer
        return data
    kept, begin = torch.zeros(data.numel(), dtype=torch.uint8, device=data.device), int(data.storage_offset())
    for copy in copies:
        shape, strides = (*copy.shape, copy.dst_itemsize), (*copy.dst_strides, 1)
        kept.as_strided(shape, strides, copy.dst_offset).copy_(data.as_strided(shape, strides, begin + copy.dst_offset))
    return kept


def _words(data: torch.Tensor) -> torch.Tensor:
    """As int64; memory that does not begin at a word of the machine is copied first."""
    return (data if data.data_ptr() % 8 == 0 and data.storage_offset() % 8 == 0 else data.clone()).view(torch.int64)


def _padded(data: torch.Tensor, offset: int) -> torch.Tensor:
    """The checksum of a few bytes, within the words that they lie in."""
    before = offset % 8
    whole = torch.zeros(-(-(before + data.numel()) // 8) * 8, dtype=torch.uint8, device=data.device)
    whole[before : before + data.numel()] = data
    words = whole.view(torch.int64)
    return _product(words, _factors(offset // 8, words.numel(), data.device))


def _product(words: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Without a temporary where torch can."""
    return torch.dot(words, factors) if words.device.type == "cpu" else (words * factors).sum()


def _factors(first: int, count: int, device: torch.device) -> torch.Tensor:
    """For the words from ``first`` on. The same table for each chunk, times an odd number of the chunk's own."""
    chunk, start = divmod(first, CHUNK_WORDS)
    if start + count > CHUNK_WORDS:
        cut = CHUNK_WORDS - start
        return torch.cat((_factors(first, cut, device), _factors(first + cut, count - cut, device)))
    table = _table(str(device))[start : start + count]
    return table * _signed(_mixed(chunk) | 1) if chunk else table


@lru_cache(maxsize=16)
def _table(device: str) -> torch.Tensor:
    """Odd numbers, well mixed (the finaliser of splitmix64)."""
    k = torch.arange(1, CHUNK_WORDS + 1, dtype=torch.int64)
    k *= _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        k ^= (k >> shift) & ((1 << (64 - shift)) - 1)
        k *= _signed(factor)
    k ^= (k >> 31) & ((1 << 33) - 1)
    return (k | 1).to(device)


def _mixed(number: int) -> int:
    value = number * 0x9E3779B97F4A7C15 & MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ (value >> shift)) * factor & MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    value &= MASK
    return value - (1 << 64) if value >> 63 else value
