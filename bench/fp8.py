"""FP8 forwards: who takes part, and what is timed of each.

A cell of dtype "fp8" is the kernel alone: everyone quantizes BF16 operands its own way, outside the time. With the
source "from_bf16" the call begins with BF16 tensors, quantizing included, beside our own 16-bit forward. Either way a
result is compared with float64 attention of the BF16 tensors, so a row's error is that of the whole recipe.
"""

from __future__ import annotations

import dataclasses
import functools

import peers
import suites
import torch
from peers import first
from tasks import TASKS, ForwardTask, Operands

from flashattn_hopper import planner
from flashattn_hopper.spec.problem import QuantizeTraits, int8_by_default

BACKEND = "sm90"  # by name it is never the reference in silence
E4M3 = torch.float8_e4m3fn
LARGEST = 448.0


class CodesTask(ForwardTask):
    """One forward pass of operands that are quantized already: `prepared` of a contestant gives call and output."""

    def bind(self, contestant):
        call, self.output = contestant.prepared(self.cell, self.ops)
        return call

    def judge(self, contestant, result):
        return super().judge(contestant, self.output(result))


TASKS |= {"codes": CodesTask, "from_bf16": ForwardTask}


def scaled(x: torch.Tensor, dims) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes, and the factor that undoes them for each place that is not in `dims`."""
    top = x.float().abs().amax(dims, keepdim=True).clamp_min(1e-30)
    descale = top / LARGEST
    return (x.float() / descale).to(E4M3), descale


# --------------------------------------------------------------------------------------------------- contestants
class Ours(peers.Ours):
    """e4m3 or int8 scores; tensors take the codes that precision="fp8" has for their headdim."""

    def __init__(self, name: str, title: str, int8: bool = False):
        self.name, self.title, self.int8 = name, title, int8

    def takes(self, cell: suites.Cell) -> bool:
        return not (self.int8 and cell.source)

    def native(self, q, k, v, causal=False, window=peers.NO_WINDOW, scale=None):
        return super().native(q, k, v, causal, window, scale, precision="fp8", backend=BACKEND)

    def prepared(self, cell: suites.Cell, ops: Operands):
        from flashattn_hopper import runner_fp8

        problem = problem_of(cell, self.int8)
        chosen = runner_fp8.plan(problem, BACKEND, ops.q.device)
        attend = runner_fp8.bind(chosen, problem, ops.q.dtype, ops.q.device)
        codes = runner_fp8.quantize(*ops, int8_qk=self.int8)
        return lambda: attend(codes, False), first


class Half(peers.Ours):
    """Our own forward of the 16-bit tensors."""

    name = "bf16"
    title = "flashattn_hopper, bf16"

    def takes(self, cell: suites.Cell) -> bool:
        return bool(cell.source)


class Kernel(peers.Contestant):
    """A peer that takes codes and has no quantizer of its own."""

    def takes(self, cell: suites.Cell) -> bool:
        return not cell.source


class Fa3(Kernel):
    """One scale for each head of each sequence."""

    name = "fa3"
    title = "FlashAttention-3 FP8"
    needs = ("fa3_fwd_interface",)
    distribution = "fa3-fwd"

    def prepared(self, cell: suites.Cell, ops: Operands):
        from fa3_fwd_interface import flash_attn_func

        if cell.num_heads_q != cell.num_heads_kv:
            raise NotImplementedError("scales of grouped heads: not in this suite")
        (q, k, v), scales = zip(*(scaled(x, (1, 3)) for x in ops))
        factors = {f"{name}_descale": s.reshape(cell.batch, -1) for name, s in zip("qkv", scales)}
        call = functools.partial(flash_attn_func, q, k, v, softmax_scale=cell.softmax_scale, causal=cell.causal)
        return functools.partial(call, **factors), first


class Cudnn(Kernel):
    """One scale for each tensor; on Hopper the output is e4m3 as well, here with a scale that fits it."""

    name = "cudnn"
    title = "cuDNN FP8"
    needs = ("cudnn",)
    distribution = "nvidia-cudnn-frontend"

    def version(self) -> str:
        import cudnn

        return f"{cudnn.backend_version_string()}, frontend {super().version()}"

    @staticmethod
    @functools.cache
    def handle():
        import cudnn

        return cudnn.create_handle()

    def prepared(self, cell: suites.Cell, ops: Operands):
        import cudnn

        fp8, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
        handle = self.handle()
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        codes, descales = zip(*(scaled(x, (0, 1, 2, 3)) for x in ops))
        largest = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in ops), is_causal=cell.causal, scale=cell.softmax_scale
        )
        scale_out = LARGEST / largest.abs().amax().float().reshape(1, 1, 1, 1)
        fixed = (torch.full((1, 1, 1, 1), x, device=ops.q.device) for x in (1 / LARGEST, LARGEST))
        factors = [*descales, *fixed, scale_out]
        operands = [x.transpose(1, 2) for x in codes]  # (B, H, S, D) as views

        graph = cudnn.pygraph(io_data_type=fp8, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle)
        of = lambda x, kind: graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=kind)
        ins = [of(x, fp8) for x in operands] + [of(x, fp32) for x in factors]
        out, _, *peaks = graph.sdpa_fp8(
            *ins, generate_stats=False, attn_scale=cell.softmax_scale, use_causal_mask=cell.causal
        )
        result = torch.empty(
            cell.batch, cell.seqlen, cell.num_heads_q, cell.headdim_v, device=ops.q.device, dtype=E4M3
        ).transpose(1, 2)
        out.set_output(True).set_dim(list(result.shape)).set_stride(list(result.stride())).set_data_type(fp8)
        for peak in peaks:
            peak.set_output(False).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1]).set_data_type(fp32)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        space = torch.empty(graph.get_workspace_size(), device=ops.q.device, dtype=torch.uint8)
        tensors = dict(zip([*ins, out], [*operands, *factors, result]))

        def call():
            graph.execute(tensors, space, handle=handle)
            return result

        return call, lambda result: (result.float() / scale_out).transpose(1, 2)


OURS = Ours("ours", "flashattn_hopper FP8")
OURS_INT8 = Ours("ours_int8", "flashattn_hopper FP8, int8 q and k", int8=True)
PEERS = {peer.name: peer for peer in (Fa3(), Cudnn())}


def lineup(names: str) -> tuple[peers.Contestant, ...]:
    """Ours, then those of the comma-separated `names` that have an FP8 forward.

    Raises: ValueError for an unknown name.
    """
    asked = [peer.name for peer in peers.parse(names)]
    return OURS, OURS_INT8, Half(), *(PEERS[name] for name in asked if name in PEERS)


# -------------------------------------------------------------------------------------------------- our variants
def problem_of(cell: suites.Cell, int8: bool = False):
    problem = cell.problem
    return dataclasses.replace(problem, traits=dataclasses.replace(problem.traits, int8_qk=int8))


def quantizer(cell: suites.Cell, int8: bool | None = None):
    """(spec, traits, tile) of the quantizer of the cell's operands, by default that of precision="fp8"."""
    from flashattn_hopper.kernels.sm90.specs import QUANTIZER

    int8 = int8_by_default(cell.headdim) if int8 is None else int8
    return QUANTIZER, QuantizeTraits("bf16", cell.headdim, cell.headdim_v, int8_qk=int8), None


def plans(cell: suites.Cell, capability: planner.Capability) -> list:
    """What ours run in the cell, (spec, compiled traits, tile). The FP8 forward of the contestant "ours" is last."""
    kernel = lambda int8: planner.plan(problem_of(cell, int8).traits, capability, BACKEND, cell.shape)
    if cell.source:
        half = dataclasses.replace(cell.traits, dtype="bf16")
        kernel = kernel(int8_by_default(cell.headdim))
        return [quantizer(cell), planner.plan(half, capability, "auto", cell.shape), kernel]
    return [quantizer(cell, False), quantizer(cell, True), kernel(True), kernel(False)]
