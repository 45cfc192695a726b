"""Runs the program of docs/native.md. Where there is no Hopper GPU, which this asks the driver itself, it must say so.

python example.py PROGRAM
"""

import ctypes
import subprocess
import sys

MAJOR, MINOR = 75, 76  # of CUdevice_attribute


def capability() -> tuple[int, int] | None:
    """Compute capability of the first GPU, None without one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, number = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None
    found = []
    for attribute in (MAJOR, MINOR):
        driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, 0)
        found.append(number.value)
    return tuple(found)


here = capability()
done = subprocess.run([sys.argv[1]], capture_output=True, text=True)
print(done.stdout + done.stderr, end="")
if here == (9, 0):
    assert done.returncode == 0 and "out is 1 everywhere" in done.stdout, done.returncode
else:
    print("no GPU here" if here is None else f"this GPU is {here}", "- the refusal is what is tested")
    said = ("FAH_NO_DEVICE: no CUDA device",) if here is None else ("FAH_UNSUPPORTED: ", "FAH_NOT_IN_LIBRARY: ")
    assert done.returncode == 2 and done.stderr.startswith(said), done.returncode
