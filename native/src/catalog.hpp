// The catalog as data. The tables are written by flashattn_hopper/native.py from the Python catalog's own answers.
#pragma once

#include <tvm/ffi/c_api.h>

#include <cstdint>

namespace fah {

enum class Pass { fwd, bwd };
enum class DType { bf16, fp16, fp8 };
enum class Mask { full, causal, window };
enum class Feature { deterministic, fp16_out, gqa, int8_qk };
enum class Wanted { all, dq, dkdv };

constexpr unsigned bit(Feature feature, bool on = true) { return unsigned{on} << int(feature); }

// Every operand of kernels/common/operands.py that a kernel of this library takes; `none` where a call passes None.
enum class Operand : uint8_t {
  none,
  q_,
  k_,
  v_,
  do_,
  o_,
  lse_,
  dlse_,
  dq_,
  dk_,
  dv_,
  workspace_,
  softmax_scale_,
  window_left_,
  window_right_,
  num_ctas_,
  tickets_,
  q_codes_,
  k_codes_,
  v_codes_,
  restored_lse_,
  counters_,
  q8_,
  k8_,
  v8_,
  q_descale_,
  k_descale_,
  v_descale_,
  k_mean_,
  logit_offset_,
  count
};

constexpr int kMostOperands = 16;

// Compiled code.
struct Variant {
  const char* name;
  TVMFFISafeCallType function;  // null: not in this library
  Operand operands[kMostOperands];
  int num_operands;

  bool takes(Operand operand) const {
    for (int i = 0; i < num_operands; ++i)
      if (operands[i] == operand) return true;
    return false;
  }
};

// One answer: of those that match a call, the first is the planner's.
struct Choice {
  int headdim, headdim_v;  // at most
  DType dtype;
  Mask mask;
  unsigned features;  // a bit set, without gqa, which changes no code
  Wanted wanted;
  int min_seqlen;  // keys
  const char* tile;
  int64_t floats_per_row, floats;  // of workspace; rows are query rows, padded
  Variant variant;
};

// What makes the operands of an FP8 forward.
struct Quantizer {
  int headdim, headdim_v;  // exactly
  DType dtype;             // of what it quantizes
  bool hadamard, smooth_k, int8_qk;
  Variant variant;
};

// The codes of q and k where none are asked for.
struct DefaultCodes {
  int headdim;  // at most
  bool int8_qk;
};

template <class T>
struct Rows {
  const T* first;
  const T* behind;

  const T* begin() const { return first; }
  const T* end() const { return behind; }
};

// A kernel on one arch. Code for an exact arch runs on that compute capability alone, other code on later minors too.
struct Port {
  int capability;  // 10 * major + minor
  bool exact;
  const Choice* choices;
  int num_choices;

  const Choice* begin() const { return choices; }
  const Choice* end() const { return choices + num_choices; }

  bool runs_on(int device) const {
    return exact ? device == capability : device / 10 == capability / 10 && device >= capability;
  }
};

struct Kernel {
  const char* name;
  const char* backend;
  Pass pass;
  unsigned dtypes, masks, features;  // bit sets
  int multiple;                      // of head dimensions
  const char* on_request;            // why "auto" passes it by; "" where it does not
  const Port* ports;
  int num_ports;

  const Port* begin() const { return ports; }
  const Port* end() const { return ports + num_ports; }
  bool has(DType dtype) const { return dtypes >> int(dtype) & 1; }
};

Rows<Kernel> kernels();
Rows<Quantizer> quantizers();
bool int8_by_default(int headdim);
int64_t padded_rows(int64_t seqlen_q);  // of a head's workspace
int64_t key_tiles(int64_t seqlen_k);    // each with a scale of K
int64_t tile_keys();
int64_t key_chunks(int64_t seqlen_k);  // of the quantizer's sums

}  // namespace fah
