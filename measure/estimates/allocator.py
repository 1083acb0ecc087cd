"""Simulate PyTorch's caching allocator, which reports the size of blocks, not of tensors."""

import bisect

from estimator.live_bytes import LiveBytes

MIB = 2**20


class Allocator:
    """The rules of PyTorch's ``CUDACachingAllocator.cpp`` for one stream, without its limits.

    A tensor gets the smallest free block that fits, from the pool for up to 1 MiB or from the large
    one. If there is none, a segment is allocated on the GPU: 2 MiB for the small pool, 20 MiB for
    less than 10 MiB, and else a multiple of 2 MiB. The rest of a block is split off, except 1 MiB
    or less of a large block: so 16,000,000 bytes take 16 MiB.
    """

    def __init__(self):
        self.allocated = self.segments = 0
        self.taken = {}  # by storage number: whether it is small, size, segment and address
        self.free = {True: [], False: []}  # by pool, small and large; sorted by size

    def take(self, number: int, size: int) -> None:
        is_small = size <= MIB
        free = self.free[is_small]
        at = bisect.bisect_left(free, (size, 0, 0))
        if at < len(free):
            block, segment, address = free.pop(at)
        else:
            rounded = -(-size // (2 * MIB)) * 2 * MIB
            block = 2 * MIB if is_small else 20 * MIB if size < 10 * MIB else rounded
            segment, address = self.segments, 0
            self.segments += 1
        if block - size > (0 if is_small else MIB):
            bisect.insort(free, (block - size, segment, address + size))
            block = size
        self.taken[number] = is_small, block, segment, address
        self.allocated += block

    def give_back(self, number: int) -> None:
        """Free a block, and merge it with adjacent free blocks."""
        is_small, size, segment, address = self.taken.pop(number)
        self.allocated -= size
        free = self.free[is_small]
        for other in [block for block in free if block[1] == segment]:
            if other[2] + other[0] == address or address + size == other[2]:
                free.remove(other)
                size, address = size + other[0], min(address, other[2])
        bisect.insort(free, (size, segment, address))


def allocated_at(live: LiveBytes, moments: list[int]) -> list[tuple[int, int]]:
    """What ``torch.cuda.memory_allocated()`` and ``max_memory_allocated()`` would have returned.

    Args:
        moments: each as the number of changes that ``live`` had counted by then.
    """
    allocator, sizes, highest, found = Allocator(), {}, 0, {}
    for count, (number, more) in enumerate(live.changes, 1):
        sizes[number] = sizes.get(number, 0) + more
        if number in allocator.taken:  # freed or resized
            allocator.give_back(number)
        if sizes[number]:
            allocator.take(number, sizes[number])
        highest = max(highest, allocator.allocated)
        found[count] = allocator.allocated, highest
    return [found[moment] for moment in moments]
