"""Runs the program of docs/native.md. Where there is no GPU, which this asks the driver itself, it must say so.

python example.py PROGRAM
"""

import ctypes
import subprocess
import sys


def num_gpus() -> int:
    try:
        driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0
    except OSError:
        return 0


done = subprocess.run([sys.argv[1]], capture_output=True, text=True)
print(done.stdout + done.stderr, end="")
if num_gpus():
    assert done.returncode == 0 and "out is 1 everywhere" in done.stdout, done.returncode
else:
    print("there is no GPU here: the refusal is what is tested")
    assert done.returncode == 2 and done.stderr.startswith("FAH_NO_DEVICE: no CUDA device"), done.returncode
