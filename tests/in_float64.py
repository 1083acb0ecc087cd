"""Run a script with float64 as the default dtype: in_float64.py SCRIPT FLAGS"""

import runpy
import sys

import torch

torch.set_default_dtype(torch.float64)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
