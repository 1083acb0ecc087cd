"""Run a script whose ranks are all asked to stop in step $STOP_AT: stop_at.py SCRIPT FLAGS"""

import os
import runpy
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.argv = sys.argv[1:]
from harness.stop import StopRequest  # noqa: E402  (harness reads the script's name)


def vote(self, step):
    self.agreed = signal.SIGTERM if step == int(os.environ["STOP_AT"]) else 0


StopRequest.vote = vote
runpy.run_path(sys.argv[0], run_name="__main__")
