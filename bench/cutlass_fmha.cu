// The forward of CUTLASS's Hopper FMHA example behind a C function, as a peer for bench/peers.py. The example's headers
// are read where the package nvidia-cutlass has them (bench/CMakeLists.txt); none of them is in this repository. Its
// backward does not compile for BF16, which is what the suites measure.
//
// BF16, tensors (B, S, H, D) with as many heads of keys as of queries, lengths in multiples of the tile.
#include <cuda_runtime.h>

#include <string>

#include "collective/fmha_fusion.hpp"
#include "cute/tensor.hpp"
#include "cutlass/bfloat16.h"
#include "cutlass/version.h"
#include "device/device_universal.hpp"
#include "kernel/fmha_kernel_builder.hpp"

namespace {

using namespace cute;
using Element = cutlass::bfloat16_t;
using Causal = cutlass::fmha::collective::CausalFusion;
using Full = cutlass::fmha::collective::DefaultFusion;
using PingPong = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
using Cooperative = cutlass::gemm::KernelTmaWarpSpecializedCooperative;

struct Shape5 {
  int batch, heads, seqlen_q, seqlen_k, headdim;
};

enum Outcome { kDone = 0, kRefused = 1, kFailed = 2 };

cutlass::KernelHardwareInfo hardware() {
  static const cutlass::KernelHardwareInfo info = [] {
    cutlass::KernelHardwareInfo info;
    cudaGetDevice(&info.device_id);
    info.sm_count = cutlass::KernelHardwareInfo::query_device_multiprocessor_count(info.device_id);
    return info;
  }();
  return info;
}

template <class Operation>
Outcome launch(const typename Operation::Arguments& arguments, void* workspace, cudaStream_t stream) {
  if (Operation::can_implement(arguments) != cutlass::Status::kSuccess) return kRefused;
  Operation operation;
  return operation.run(arguments, workspace, stream) == cutlass::Status::kSuccess ? kDone : kFailed;
}

template <class Tile, class Fusion, class Policy>
Outcome forward(const Shape5& s, const void* q, const void* k, const void* v, void* out, float* lse,
                cudaStream_t stream) {
  using Stride = tuple<int, _1, tuple<int, int>>;  // token, element, (batch, head)
  using Kernel = typename cutlass::fmha::kernel::FmhaBuilder<Element, float, float, Tile, Stride, Stride, Stride,
                                                             Fusion, Policy>::Kernel;
  using Operation = cutlass::device::Universal<Kernel>;
  if (s.seqlen_q % size<0>(Tile{}) || s.seqlen_k % size<1>(Tile{})) return kRefused;
  const int row = s.heads * s.headdim;
  const Stride of_q{row, _1{}, {row * s.seqlen_q, s.headdim}}, of_k{row, _1{}, {row * s.seqlen_k, s.headdim}};
  const auto at = [](const void* p) { return static_cast<const Element*>(p); };
  return launch<Operation>({{s.batch, s.heads, s.seqlen_q, s.seqlen_k, s.headdim},
                            {at(q), of_q, at(k), of_k, at(v), of_k},
                            {static_cast<Element*>(out), of_q, lse, {_1{}, {s.heads * s.seqlen_q, s.seqlen_q}}},
                            hardware()},
                           nullptr, stream);
}

template <class Tile, class Policy>
Outcome forward_as(bool causal, const Shape5& s, const void* q, const void* k, const void* v, void* out, float* lse,
                   cudaStream_t stream) {
  return causal ? forward<Tile, Causal, Policy>(s, q, k, v, out, lse, stream)
                : forward<Tile, Full, Policy>(s, q, k, v, out, lse, stream);
}

}  // namespace

extern "C" {

// 0 done, 1 refused, 2 the launch failed. lse (B, H, Sq) float32, natural log.
int cutlass_fmha_forward(int causal, int batch, int heads, int seqlen_q, int seqlen_k, int headdim, const void* q,
                         const void* k, const void* v, void* out, float* lse, void* stream) {
  const Shape5 s{batch, heads, seqlen_q, seqlen_k, headdim};
  const auto on = static_cast<cudaStream_t>(stream);
  switch (headdim) {
    case 64:
      return forward_as<Shape<_128, _64, _64>, PingPong>(causal, s, q, k, v, out, lse, on);
    case 128:
      return forward_as<Shape<_128, _128, _128>, PingPong>(causal, s, q, k, v, out, lse, on);
    case 256:
      return forward_as<Shape<_128, _64, _256>, Cooperative>(causal, s, q, k, v, out, lse, on);
  }
  return kRefused;
}

const char* cutlass_fmha_version() {
  static const std::string version =
      std::to_string(CUTLASS_MAJOR) + "." + std::to_string(CUTLASS_MINOR) + "." + std::to_string(CUTLASS_PATCH);
  return version.c_str();
}

}  // extern "C"
