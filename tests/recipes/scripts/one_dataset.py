"""Run a script of Accelerate's tests with data of one seed.

Without a seed, one comparison in a thousand fails because of a rounding, under torchrun too.
"""

import runpy
import sys

from accelerate.test_utils.training import RegressionDataset

if __name__ == "__main__":
    RegressionDataset.__init__.__defaults__ = (2, 3, 64, 1)  # a, b, length, seed
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
