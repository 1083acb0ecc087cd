"""Who hangs where: reports the ranks, collectives and lines of a run that waits forever."""
