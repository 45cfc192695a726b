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

}  // namespace fah

struct fah_plan {
  fah::Pass pass;
  fah::DType dtype;
  const fah::Choice* choice;
  int device;  // FAH_NO_ORDINAL: not to be launched
  int num_sms;
  fah::Layout q, k, v, dout;
  float softmax_scale;
  int64_t window_left, window_right;  // edges as kernels take them
  fah_workspace workspace;
  mutable std::atomic<bool> loaded{false};  // its code is on the device
};

namespace fah {

// Fills in `plan`. Raises Error.
void make_plan(const fah_problem& problem, fah_plan& plan);

}  // namespace fah
