#include "catalog.hpp"

namespace fah {
namespace {
#include "tables.inc"
}  // namespace

Kernels kernels() { return {kKernels, kKernels + sizeof(kKernels) / sizeof(kKernels[0])}; }

int64_t padded_rows(int64_t seqlen_q) { return (seqlen_q + kRowPad - 1) / kRowPad * kRowPad; }

}  // namespace fah
