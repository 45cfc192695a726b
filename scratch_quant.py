"""python scratch_quant.py TREE...   one process for each tree; compiles side by side, the GPU one after the other."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time

DIMS = (64, 128, 256)


def main(trees):
    begin = time.time()
    children = []
    for tree in trees:
        log = open(f"/tmp/quant_{os.getpid()}_{len(children)}.log", "w+")
        env = dict(os.environ, PYTHONSAFEPATH="1")
        children.append((tree, log, subprocess.Popen([sys.executable, __file__, "--one", tree], stdout=log, stderr=subprocess.STDOUT, env=env)))
    for tree, log, child in children:
        try:
            child.wait(max(150 - (time.time() - begin), 1))
        except subprocess.TimeoutExpired:
            child.kill()
            print(f"{tree}: TIMEOUT (a hang?)")
        log.seek(0)
        print(f"==== {tree} rc {child.returncode}\n{log.read()}", flush=True)
    print(f"{time.time() - begin:.0f} s in all")


def variant(word):
    """TREE@NAME=VALUE@...: a copy of TREE with constants of kernels/sm90/quantize.py replaced."""
    tree, *changes = word.split("@")
    tree = os.path.abspath(tree)
    if not changes:
        return tree
    target = f"/tmp/quant_variants/{re.sub('[^A-Za-z0-9=]+', '_', word)}"
    shutil.rmtree(target, ignore_errors=True)
    for folder in ("flashattn_hopper", "kernels"):
        shutil.copytree(f"{tree}/{folder}", f"{target}/{folder}")
    path = f"{target}/kernels/sm90/quantize.py"
    text = open(path).read()
    for change in changes:
        name, _, value = change.partition("=")
        text, n = re.subn(rf"^{name} = [^#\n]*", f"{name} = {value}  ", text, flags=re.M)
        assert n == 1, change
    open(path, "w").write(text)
    return target


def use(tree):
    os.environ["FLASHATTN_HOPPER_CACHE_DIR"] = f"/tmp/quant_cache_{tree.strip('/').replace('/', '_')}"
    sys.path.insert(0, tree)
    import flashattn_hopper.kernels as k

    k.__path__.insert(0, f"{tree}/kernels")
    from flashattn_hopper.kernels.sm90 import quantize as kernel

    assert kernel.__file__.startswith(tree), kernel.__file__


def compile_one(tree, d, int8):
    use(tree)
    from flashattn_hopper import jit
    from flashattn_hopper.kernels.sm90.specs import QUANTIZER
    from flashattn_hopper.spec.problem import QuantizeTraits

    jit.compiled(QUANTIZER, QuantizeTraits("bf16", d, d, int8_qk=int8), None, QUANTIZER.arch)


def one(tree):
    use(tree)
    import torch

    import flashattn_hopper
    from flashattn_hopper import quantize, runner_fp8
    from flashattn_hopper.quantize import E4M3, TILE, _quantized, rotate

    assert flashattn_hopper.__file__.startswith(tree), flashattn_hopper.__file__
    t0 = time.time()
    jobs = [
        subprocess.Popen([sys.executable, __file__, "--compile", tree, str(d), str(i)]) for d in DIMS for i in (0, 1)
    ]
    for job in jobs:
        job.wait()
    print(f"compiled in {time.time() - t0:.1f} s", flush=True)
    gpu = open("/tmp/quant_gpu.lock", "w")
    fcntl.flock(gpu, fcntl.LOCK_EX)
    torch.manual_seed(0)

    def same(a, b):
        nan = a.float().isnan(), b.float().isnan()
        raw = lambda x: x.view(torch.uint8 if x.element_size() == 1 else torch.int32)
        return torch.equal(*nan) and torch.equal(raw(a).masked_fill(nan[0], 0), raw(b).masked_fill(nan[0], 0))

    for d in DIMS:
        for int8 in (False, True):
            q, key0, v = (torch.randn(2, s, h, d).bfloat16() for s, h in ((300, 4), (777, 2), (777, 2)))
            key0 = key0 + 4 * torch.randn(2, 1, 2, d).bfloat16()
            bad = []
            for attempt in range(3):
                codes = runner_fp8.quantize(q.cuda(), key0.cuda(), v.cuda(), int8_qk=int8)
                torch.cuda.synchronize()
                found = codes._replace(**{n: x.cpu() for n, x in codes._asdict().items() if x is not None})
                mean = key0.float().sum(1) / 777
                wanted = quantize.quantize_fp8(q, key0, v)
                if not torch.allclose(found.k_mean, mean, rtol=1e-5, atol=1e-5):
                    bad.append(f"mean {(found.k_mean - mean).abs().max():.2e}")
                if not torch.allclose(found.logit_offset, wanted[0].logit_offset, rtol=1e-4, atol=1e-2):
                    bad.append("offset")
                key = key0.float() - found.k_mean[:, None]
                code = torch.int8 if int8 else E4M3
                expected = (_quantized(rotate(q.float()), 1, code), _quantized(rotate(key), TILE, code), _quantized(v.float(), None, E4M3))
                packed = found._replace(v=runner_fp8.unpack_values(found.v, 777))
                for name, (data, descale) in zip("qkv", expected):
                    if not same(getattr(packed, f"{name}_descale"), descale):
                        bad.append(f"scale of {name}")
                    if not same(getattr(packed, name), data):
                        n = (getattr(packed, name).view(torch.uint8) != data.view(torch.uint8)).sum().item()
                        bad.append(f"{n} codes of {name}")
            print(f"check d{d} {'int8' if int8 else 'fp8'}: {'bit for bit' if not bad else bad}", flush=True)

    flush = torch.empty(5 << 29, dtype=torch.uint8, device="cuda")
    src = torch.empty(151 << 20, dtype=torch.uint8, device="cuda")
    dst = torch.empty_like(src)

    def timed(fn, n=20):
        for _ in range(3):
            fn()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(n)]
        for a, b in events:
            flush.zero_()
            a.record()
            fn()
            b.record()
        torch.cuda.synchronize()
        times = sorted(a.elapsed_time(b) * 1e3 for a, b in events)
        return f"median {times[n // 2]:6.1f} us, min {times[0]:6.1f}, max {times[-1]:6.1f}"

    cases = [(4, 4096, 2048 // d, 2048 // d, d, i) for d in DIMS for i in (False, True)]
    cases += [(1, 16384, 16, 16, 128, False), (16, 1024, 16, 16, 128, False), (4, 4096, 16, 4, 128, False)]
    for b, s, h, hk, d, int8 in cases:
        q, k_, v = (torch.randn(b, s, n, d, device="cuda", dtype=torch.bfloat16) for n in (h, hk, hk))
        call = lambda: runner_fp8.quantize(q, k_, v, int8_qk=int8)
        text = timed(call)
        t0 = time.perf_counter()
        for _ in range(100):
            call()
        host = (time.perf_counter() - t0) * 1e4
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
            for _ in range(5):
                flush.zero_()
                call()
            torch.cuda.synchronize()
        kernels = {e.key.split("flashattn")[0][-30:]: round(e.device_time, 1) for e in prof.key_averages() if "cutlass" in e.key}
        print(f"b{b} s{s} h{h}:{hk} d{d} {'int8' if int8 else 'fp8 '}: {text}; host {host:.0f} us; {kernels}", flush=True)
    print(f"copy of 151 MiB (302 MiB moved): {timed(lambda: dst.copy_(src))}")


if __name__ == "__main__":
    if sys.argv[1] == "--compile":
        compile_one(sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1")
        sys.exit()
    one(sys.argv[2]) if sys.argv[1] == "--one" else main([variant(t) for t in sys.argv[1:]])
