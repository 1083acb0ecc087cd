"""torchrun, with one difference: it forks its ranks instead of starting them, so that they need not
import PyTorch. All else is torchrun's own: how it watches them, ends them and starts them again.

tests/fork_server.py runs it, and so it has imported PyTorch itself.
"""

import atexit
import os
import signal
import subprocess
import sys
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from fork_server import become_script  # noqa: E402


class Forked(subprocess.Popen):
    """A process of a Python script in place of another process."""

    def _execute_child(self, words, executable, preexec, close_fds, pass_fds, cwd, env, *_):
        self._child_created = True
        self.pid = os.fork()
        if self.pid:
            return
        atexit._clear()  # the agent's
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        os.environ.clear()
        os.environ.update(env)
        become_script(list(words[words.index("-u") + 1 :]))


subprocess_handler.Popen = Forked
run.main(sys.argv[1:])
