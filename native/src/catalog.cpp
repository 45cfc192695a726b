#include "catalog.hpp"

#include <algorithm>
#include <iterator>

namespace fah {
namespace {
#include "tables.inc"

constexpr int64_t parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

}  // namespace

Rows<Kernel> kernels() { return {kKernels, kKernels + sizeof(kKernels) / sizeof(kKernels[0])}; }
Rows<Quantizer> quantizers() { return {kQuantizers, kQuantizers + sizeof(kQuantizers) / sizeof(kQuantizers[0])}; }

// Beyond the last row no kernel has room; what it would be is still named.
bool int8_by_default(int headdim) {
  const auto fits = [&](const DefaultCodes& codes) { return headdim <= codes.headdim; };
  const auto found = std::find_if(std::begin(kDefaultCodes), std::end(kDefaultCodes) - 1, fits);
  return found->int8_qk;
}

int64_t padded_rows(int64_t seqlen_q) { return parts(seqlen_q, kRowPad) * kRowPad; }
int64_t tile_keys() { return kTile; }
int64_t key_tiles(int64_t seqlen_k) { return parts(seqlen_k, kTile); }
int64_t key_chunks(int64_t seqlen_k) { return std::min(parts(seqlen_k, kChunk), kMostChunks); }

}  // namespace fah
