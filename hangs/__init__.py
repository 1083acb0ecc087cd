"""Who hangs where: reports the ranks, collectives and lines of a run that waits forever."""

from hangs.watch import listen as listen
from hangs.watch import prepare as prepare
