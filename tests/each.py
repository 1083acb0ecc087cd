"""Runs several scripts one after the other in one process: python tests/each.py SCRIPT SCRIPT ...

What each prints follows a line with its path.
"""

import os
import runpy
import sys

scripts = sys.argv[1:]
sys.path.insert(0, os.path.dirname(scripts[0]))
for script in scripts:
    print(f"== {script}", flush=True)
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")
