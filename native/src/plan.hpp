// A problem, checked, and the kernel that the catalog chooses for it.
#pragma once

#include <atomic>
#include <cstdint>

#include "catalog.hpp"
#include "flashattn_hopper.h"

namespace fah {

// A tensor (batch, seqlen, heads, headdim) without its address.
struct Layout {
  int64_t shape[4];
  int64_t strides[4];  // elements
};

constexpr int kNumKept = 11;

// What is kept between the quantizer and the attention kernel. v is (batch, heads, headdim_v, keys in whole tiles).
struct Codes {
  struct Place {
    Operand operand;
    size_t offset;  // bytes, in the workspace
  };

  bool int8_qk;
  Layout q, k, v;
  Place places[kNumKept];
};

}  // namespace fah

struct fah_plan {
  fah::Pass pass;
  fah::DType dtype;  // of the tensors: 16 bits
  const fah::Choice* choice;
  const fah::Quantizer* quantizer;  // of FP8
  int device;                       // FAH_NO_ORDINAL: not to be launched
  int num_sms;
  fah::Layout q, k, v, dout;
  fah::Codes codes;  // of FP8
  float softmax_scale;
  int64_t window_left, window_right;  // edges as kernels take them
  fah_workspace workspace;
  mutable std::atomic<bool> loaded{false};  // its code is on the device
};

namespace fah {

// Fills in `plan`. Raises Error.
void make_plan(const fah_problem& problem, fah_plan& plan);

}  // namespace fah
