"""Simulate PyTorch's caching allocator, which reports the size of blocks, not of tensors."""

import bisect
from collections import defaultdict

from estimator.live_bytes import LiveBytes

MIB = 2**20


class Allocator:
    """The rules of PyTorch's ``CUDACachingAllocator.cpp``, without its limits.

    A tensor gets the smallest free block that fits, from the pool of its stream for up to 1 MiB or
    from the large one. If there is none, a segment is allocated on the GPU: 2 MiB for the small
    pool, 20 MiB for less than 10 MiB, and else a multiple of 2 MiB. The rest of a block is split
    off, except 1 MiB or less of a large block: so 16,000,000 bytes take 16 MiB.

    With ``expandable_segments:True`` a pool is one segment that grows by multiples of 20 MiB, or of
    2 MiB if it is small. Its last block is used if no other fits, and any rest is split off.
    """

    def __init__(self, expandable: bool = False):
        self.allocated = self.reserved = self.segments = 0
        self.expandable = expandable
        self.taken = {}  # by storage number: pool, size, segment and address
        self.free = defaultdict(list)  # by stream and whether it is small: sorted by size
        self.ends = defaultdict(int)  # likewise, of the segment that grows

    def take(self, number: int, size: int, stream: int = 0) -> None:
        pool = stream, size <= MIB
        free = self.free[pool]
        end = self.ends[pool]
        fit = free[bisect.bisect_left(free, (size, 0, 0)) :]
        fit = [block for block in fit[:2] if not end or block[0] + block[2] < end] or fit
        block, segment, address = fit[0] if fit else self.grow(pool, size)
        if fit:
            free.remove(fit[0])
        wasted = 0 if pool[1] or self.expandable else MIB  # at most this, by not splitting a block
        if block - size > wasted:
            bisect.insort(free, (block - size, segment, address + size))
            block = size
        self.taken[number] = pool, block, segment, address
        self.allocated += block

    def grow(self, pool: tuple[int, bool], size: int) -> tuple[int, int, int]:
        """A new block: its size, segment and address."""
        _, small = pool
        end = self.ends[pool]
        if not self.expandable:
            if small:
                block = 2 * MIB
            elif size < 10 * MIB:
                block = 20 * MIB
            else:
                block = -(-size // (2 * MIB)) * 2 * MIB
            self.segments += 1
            self.reserved += block
            return block, self.segments, 0
        last = next((block for block in self.free[pool] if block[0] + block[2] == end), (0, 0, end))
        if last[0]:
            self.free[pool].remove(last)
        step = 2 * MIB if small else 20 * MIB
        more = -(-(size - last[0]) // step) * step
        self.ends[pool] += more
        self.reserved += more
        return last[0] + more, 0, last[2]

    def give_back(self, number: int) -> None:
        """Free a block, and merge it with adjacent free blocks."""
        pool, size, segment, address = self.taken.pop(number)
        self.allocated -= size
        free = self.free[pool]
        for other in [block for block in free if block[1] == segment]:
            if other[2] + other[0] == address or address + size == other[2]:
                free.remove(other)
                size += other[0]
                address = min(address, other[2])
        bisect.insort(free, (size, segment, address))


def replay(live: LiveBytes, expandable: bool = False) -> tuple[int, int]:
    """What ``torch.cuda.max_memory_allocated()`` and ``max_memory_reserved()`` would have returned
    after all that ``live`` has counted."""
    allocator = Allocator(expandable)
    sizes = {}
    highest = 0
    for number, more in live.changes:
        sizes[number] = sizes.get(number, 0) + more
        if number in allocator.taken:  # freed or resized
            allocator.give_back(number)
        if sizes[number]:
            allocator.take(number, sizes[number], live.streams[number])
        highest = max(highest, allocator.allocated)
    return highest, allocator.reserved
