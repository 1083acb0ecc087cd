"""What PyTorch's caching allocator reports as allocated: its blocks, not the tensors in them."""

import bisect

from estimator.live_bytes import LiveBytes

MIB = 2**20


class Allocator:
    """The rules of PyTorch's ``CUDACachingAllocator.cpp`` for one stream, without its limits.

    A tensor gets the smallest block that is free and fits, of the pool of up to 1 MiB or of the
    other. If none is free, a segment is taken from the GPU: of 2 MiB for small ones, of 20 MiB for
    less than 10 MiB, and above of a multiple of 2 MiB. What remains of a block is split off, but
    for 1 MiB or less of a large one: so 16,000,000 bytes take 16 MiB.
    """

    def __init__(self):
        self.allocated = self.segments = 0
        self.taken = {}  # by number of a storage: is it small, and size, segment and address
        self.free = {True: [], False: []}  # of the small pool and of the other, the smallest first

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
        """And join the block with those beside it that are free."""
        is_small, size, segment, address = self.taken.pop(number)
        self.allocated -= size
        free = self.free[is_small]
        for other in [block for block in free if block[1] == segment]:
            if other[2] + other[0] == address or address + size == other[2]:
                free.remove(other)
                size, address = size + other[0], min(address, other[2])
        bisect.insort(free, (size, segment, address))


def allocated_at(live: LiveBytes, moments: list[int]) -> list[tuple[int, int]]:
    """What ``torch.cuda.memory_allocated()`` and ``max_memory_allocated()`` would have said.

    Args:
        moments: numbers of changes that ``live`` had counted by then.
    """
    allocator, sizes, highest, found = Allocator(), {}, 0, {}
    for count, (number, more) in enumerate(live.changes, 1):
        sizes[number] = sizes.get(number, 0) + more
        if number in allocator.taken:  # freed, or of another size
            allocator.give_back(number)
        if sizes[number]:
            allocator.take(number, sizes[number])
        highest = max(highest, allocator.allocated)
        found[count] = allocator.allocated, highest
    return [found[moment] for moment in moments]
