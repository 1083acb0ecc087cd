"""Run a script unchanged, then print how many of gloo's threads it leaves behind.

python tests/count_threads.py SCRIPT [flags of the script]
"""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main():
    sys.argv = [str(ROOT / sys.argv[1]), *sys.argv[2:]]
    sys.path.insert(0, str(ROOT))
    runpy.run_path(sys.argv[0], run_name="__main__")
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    print("threads of gloo left:", sum("gloo" in name for name in names))


if __name__ == "__main__":
    main()
