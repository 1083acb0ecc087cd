"""The order of 1F1B: which micro-batch a stage computes when, forward or backward.

Problem     With 4 stages and 16 micro-batches, a stage that computes all forwards first keeps the
            activations of 16 micro-batches. 1F1B takes the same time, and keeps those of 4 at most.
Write       order().
The judge   computes the schedule, without ranks: whether a stage waits forever, how many
            micro-batches it keeps, and how long it takes if a backward takes twice as long as a
            forward. It tries fewer micro-batches than stages, too.
"""


def order(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """What a stage computes, in order: ("F", i) is forward of micro-batch i, ("B", i) its backward.

    A forward needs that of the stage before it; a backward needs that of the stage after it. The
    first stage is 0.

    Hint: a stage begins with as many forwards as there are stages after it. Then it alternates, one
    forward and one backward, and ends with the backwards that are left.
    """
    raise NotImplementedError("order() is a list of forwards and backwards")
