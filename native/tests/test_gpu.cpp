// Forward and backward on the GPU through the C interface, against the reference on the host.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "flashattn_hopper.h"
#include "reference.hpp"

namespace {

using reference::Doubles;

void ok(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}
#define CUDA(call) ok(call, #call)

// Device memory with guards of a known pattern on both sides, and every byte of what a kernel is to write a NaN.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_(bytes) {
    CUDA(cudaMalloc(&base_, bytes_ + 2 * kGuard));
    CUDA(cudaMemset(base_, 0xa5, bytes_ + 2 * kGuard));
    CUDA(cudaMemset(data(), 0xff, bytes_));
  }
  ~Buffer() { cudaFree(base_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return static_cast<char*>(base_) + kGuard; }
  float* floats() const { return static_cast<float*>(data()); }
  void zero() { CUDA(cudaMemset(data(), 0, bytes_)); }

  template <class T>
  std::vector<T> get() const {
    std::vector<T> host(bytes_ / sizeof(T));
    CUDA(cudaMemcpy(host.data(), data(), host.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }
  template <class T>
  void put(const std::vector<T>& host) {
    CUDA(cudaMemcpy(data(), host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  bool guarded() const {
    std::vector<unsigned char> host(bytes_ + 2 * kGuard);
    CUDA(cudaMemcpy(host.data(), base_, host.size(), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < kGuard; ++i)
      if (host[i] != 0xa5 || host[kGuard + bytes_ + i] != 0xa5) return false;
    return true;
  }

 private:
  static constexpr size_t kGuard = 4096;
  void* base_ = nullptr;
  size_t bytes_;
};

struct Case {
  const char* backend;
  int batch, seqlen_q, seqlen_k, heads, heads_kv, headdim;
  reference::Window window;
  bool packed, deterministic;
};

template <class Element>
std::vector<Element> numbers(size_t count, int seed) {
  std::mt19937 source(seed);
  std::normal_distribution<float> normal;
  std::vector<Element> made(count);
  for (Element& x : made) x = Element(normal(source));
  return made;
}

// q, k and v on both sides. Packed: k and v are halves of one tensor (B, Sk, 2, Hk, D).
template <class Element>
struct Operands {
  Operands(const Case& c, int headdim_v, float offset)
      : q(numbers<Element>(size_t(c.batch) * c.seqlen_q * c.heads * c.headdim, 1)),
        k(numbers<Element>(size_t(c.batch) * c.seqlen_k * c.heads_kv * c.headdim, 2)),
        v(numbers<Element>(size_t(c.batch) * c.seqlen_k * c.heads_kv * headdim_v, 3)),
        q_(q.size() * 2),
        kv_((k.size() + v.size()) * 2) {
    const size_t row = size_t(c.heads_kv) * c.headdim;  // of one token
    const auto common = numbers<Element>(row, 6);       // to all keys of a head
    for (size_t i = 0; i < k.size() && offset != 0; ++i) k[i] = Element(float(k[i]) + offset * float(common[i % row]));
    q_.put(q);
    std::vector<Element> both(k.size() + v.size());
    if (c.packed) {
      for (size_t i = 0; i < k.size(); ++i) {
        both[2 * (i / row) * row + i % row] = k[i];
        both[(2 * (i / row) + 1) * row + i % row] = v[i];
      }
    } else {
      std::copy(v.begin(), v.end(), std::copy(k.begin(), k.end(), both.begin()));
    }
    kv_.put(both);
    k_at = static_cast<char*>(kv_.data());
    v_at = static_cast<char*>(kv_.data()) + 2 * (c.packed ? row : k.size());
  }

  std::vector<Element> q, k, v;
  Buffer q_, kv_;
  const void *k_at, *v_at;
};

template <class Element>
fah_problem problem_of(const Case& c, fah_pass pass) {
  fah_problem p;
  fah_problem_init(&p);
  p.pass = pass;
  p.dtype = std::is_same<Element, cutlass::half_t>::value ? FAH_FP16 : FAH_BF16;
  p.batch = c.batch;
  p.seqlen_q = c.seqlen_q;
  p.seqlen_k = c.seqlen_k;
  p.num_heads_q = c.heads;
  p.num_heads_kv = c.heads_kv;
  p.headdim = c.headdim;
  p.window_left = c.window.left;
  p.window_right = c.window.right;
  p.deterministic = c.deterministic;
  p.backend = c.backend;
  if (c.packed) {  // k and v are halves of one tensor (B, Sk, 2, Hk, D)
    const int64_t row = int64_t{2} * c.heads_kv * c.headdim;
    for (auto* strides : {p.k_strides, p.v_strides}) {
      strides[0] = row * c.seqlen_k;
      strides[1] = row;
      strides[2] = c.headdim;
    }
  }
  return p;
}

std::string name_of(const Case& c, const char* dtype) {
  char text[200];
  std::snprintf(text, sizeof(text), "%s %s B%d Sq%d Sk%d H%d/%d D%d window(%d,%d)%s%s", c.backend, dtype, c.batch,
                c.seqlen_q, c.seqlen_k, c.heads, c.heads_kv, c.headdim, int(c.window.left), int(c.window.right),
                c.packed ? " packed" : "", c.deterministic ? " deterministic" : "");
  return text;
}

// One head of (B, S, H, D) as doubles.
template <class T>
Doubles head_of(const std::vector<T>& x, int b, int h, int seqlen, int heads, int width) {
  Doubles made(size_t(seqlen) * width);
  for (int s = 0; s < seqlen; ++s)
    for (int c = 0; c < width; ++c)
      made[size_t(s) * width + c] = double(float(x[((size_t(b) * seqlen + s) * heads + h) * width + c]));
  return made;
}

// The budget: twice the error that rounding every intermediate brings about, and one rounding of the largest value.
struct Errors {
  double kernel = 0, plain = 0, size = 0;
  bool finite = true;

  void add(const Doubles& got, const Doubles& exact, const Doubles& rounded) {
    for (size_t i = 0; i < got.size(); ++i) {
      if (std::isinf(exact[i])) {
        finite &= got[i] == exact[i];
        continue;
      }
      finite &= std::isfinite(got[i]);
      kernel = std::max(kernel, std::abs(got[i] - exact[i]));
      plain = std::max(plain, std::abs(rounded[i] - exact[i]));
      size = std::max(size, std::abs(exact[i]));
    }
  }
  bool within(double unit) const { return finite && kernel <= 2 * plain + unit * size; }
  std::string words() const {
    char text[120];
    std::snprintf(text, sizeof(text), "error %.3g, by rounding alone %.3g, largest value %.3g%s", kernel, plain, size,
                  finite ? "" : ", NaN or inf in the wrong place");
    return text;
  }
};

void add_to(Doubles& sum, const Doubles& x) {
  sum.resize(x.size());
  for (size_t i = 0; i < x.size(); ++i) sum[i] += x[i];
}

std::set<std::string> ran, left_out;

// False where the library was built without the kernel.
bool plan_for(const fah_problem& problem, fah_plan** plan, const std::string& name) {
  const fah_status status = fah_plan_create(&problem, plan);
  if (status == FAH_NOT_IN_LIBRARY || status == FAH_UNSUPPORTED) {
    left_out.insert(name + ": " + std::string(fah_last_error()).substr(0, 160));
    return false;
  }
  CHECK_SAID(status == FAH_OK, name + ": " + fah_last_error());
  return status == FAH_OK;
}

template <class Element>
void compare(const Case& c, const char* dtype, double unit) {
  const std::string name = name_of(c, dtype);
  fah_plan *forward = nullptr, *backward = nullptr;
  if (!plan_for(problem_of<Element>(c, FAH_FORWARD), &forward, name)) return;
  const bool both = plan_for(problem_of<Element>(c, FAH_BACKWARD), &backward, name + " backward");

  const size_t nq = size_t(c.batch) * c.seqlen_q * c.heads * c.headdim;
  const size_t nk = size_t(c.batch) * c.seqlen_k * c.heads_kv * c.headdim;
  const size_t rows = size_t(c.batch) * c.heads * c.seqlen_q;
  const Operands<Element> operands(c, c.headdim, 0);
  const auto &q = operands.q, &k = operands.k, &v = operands.v;
  const Buffer& q_ = operands.q_;
  const void *const k_at = operands.k_at, *const v_at = operands.v_at;
  const auto dout = numbers<Element>(nq, 4);
  std::vector<float> dlse;
  for (Element x : numbers<Element>(rows, 5)) dlse.push_back(float(x));
  Buffer dout_(nq * 2), out(nq * 2), lse(rows * 4), dlse_(rows * 4);
  Buffer dq(nq * 2), dk(nk * 2), dv(nk * 2);
  dout_.put(dout);
  dlse_.put(dlse);
  fah_workspace w{};
  CHECK(fah_plan_workspace(forward, &w) == FAH_OK);
  Buffer workspace(w.bytes + 16);
  if (w.zeroed) workspace.zero();
  const fah_forward_args f{q_.data(), k_at, v_at, out.data(), lse.floats(), workspace.data()};
  CHECK_SAID(fah_forward(forward, &f, nullptr) == FAH_OK, name + ": " + fah_last_error());
  CUDA(cudaDeviceSynchronize());
  ran.insert(fah_plan_variant(forward));
  if (w.zeroed) {  // a second launch on the same workspace gives the same
    const auto first = out.get<uint16_t>();
    CHECK(fah_forward(forward, &f, nullptr) == FAH_OK);
    CUDA(cudaDeviceSynchronize());
    CHECK_SAID(first == out.get<uint16_t>(), name + ": two launches differ");
  }
  if (both) {
    CHECK(fah_plan_workspace(backward, &w) == FAH_OK);
    Buffer sums(w.bytes);
    const fah_backward_args b{dout_.data(),   q_.data(), k_at,      v_at,      out.data(), lse.floats(),
                              dlse_.floats(), dq.data(), dk.data(), dv.data(), sums.data()};
    CHECK_SAID(fah_backward(backward, &b, nullptr) == FAH_OK, name + ": " + fah_last_error());
    CUDA(cudaDeviceSynchronize());
    CHECK_SAID(sums.guarded(), name + ": the workspace is too small");
    ran.insert(fah_plan_variant(backward));
    if (c.deterministic) {
      const auto first = dq.get<uint16_t>();
      CHECK(fah_backward(backward, &b, nullptr) == FAH_OK);
      CUDA(cudaDeviceSynchronize());
      CHECK_SAID(first == dq.get<uint16_t>(), name + ": dq differs");
    }
  }
  // Gradients that are wanted alone, beside those of all: of these dtypes and head dimensions.
  const bool alone = both && c.packed && c.headdim == (std::is_same<Element, cutlass::half_t>::value ? 128 : 64);
  Buffer only_dq(nq * 2), only_dk(nk * 2), only_dv(nk * 2);
  bool has_dq = false, has_dkdv = false;
  for (fah_gradients gradients : {FAH_DQ, FAH_DK_DV}) {
    fah_problem problem = problem_of<Element>(c, FAH_BACKWARD);
    problem.gradients = gradients;
    fah_plan* some = nullptr;
    if (!alone || !plan_for(problem, &some, name + " some gradients")) continue;
    CHECK(fah_plan_workspace(some, &w) == FAH_OK);
    Buffer sums(w.bytes);
    const bool queries = gradients == FAH_DQ;
    const fah_backward_args b{dout_.data(),
                              q_.data(),
                              k_at,
                              v_at,
                              out.data(),
                              lse.floats(),
                              dlse_.floats(),
                              queries ? only_dq.data() : nullptr,
                              queries ? nullptr : only_dk.data(),
                              queries ? nullptr : only_dv.data(),
                              sums.data()};
    CHECK_SAID(fah_backward(some, &b, nullptr) == FAH_OK, name + ": " + fah_last_error());
    CUDA(cudaDeviceSynchronize());
    CHECK_SAID(sums.guarded(), name + ": the workspace is too small");
    ran.insert(fah_plan_variant(some));
    (queries ? has_dq : has_dkdv) = true;
    fah_plan_destroy(some);
  }
  for (const Buffer* one : {&out, &lse, &dq, &dk, &dv, &only_dq, &only_dk, &only_dv})
    CHECK_SAID(one->guarded(), name + ": written beside an output");

  const auto out_ = out.get<Element>(), dq_ = dq.get<Element>(), dk_ = dk.get<Element>(), dv_ = dv.get<Element>();
  const auto only_dq_ = only_dq.get<Element>(), only_dk_ = only_dk.get<Element>(), only_dv_ = only_dv.get<Element>();
  const auto lse_ = lse.get<float>();
  Errors e_out, e_lse, e_dq, e_dk, e_dv, e_only_dq, e_only_dk, e_only_dv;
  const reference::Head head{c.seqlen_q, c.seqlen_k, c.headdim, c.headdim, c.window, 1 / std::sqrt(double(c.headdim))};
  const int group = c.heads / c.heads_kv;
  for (int b = 0; b < c.batch; ++b)
    for (int hk = 0; hk < c.heads_kv; ++hk) {
      Doubles dk_sums[2], dv_sums[2];
      const Doubles kh = head_of(k, b, hk, c.seqlen_k, c.heads_kv, c.headdim);
      const Doubles vh = head_of(v, b, hk, c.seqlen_k, c.heads_kv, c.headdim);
      for (int h = hk * group; h < (hk + 1) * group; ++h) {
        const auto of = [&](const std::vector<Element>& x) { return head_of(x, b, h, c.seqlen_q, c.heads, c.headdim); };
        const size_t first = (size_t(b) * c.heads + h) * c.seqlen_q;
        const Doubles dl(dlse.begin() + first, dlse.begin() + first + c.seqlen_q);
        const auto run = [&](bool exact) {
          return reference::attention<Element>(head, of(q), kh, vh, of(dout), dl, exact);
        };
        const reference::Result exact = run(true), plain = run(false);
        e_out.add(of(out_), exact.out, plain.out);
        e_lse.add(Doubles(lse_.begin() + first, lse_.begin() + first + c.seqlen_q), exact.lse, plain.lse);
        if (!both) continue;
        e_dq.add(of(dq_), exact.dq, plain.dq);
        if (has_dq) e_only_dq.add(of(only_dq_), exact.dq, plain.dq);
        add_to(dk_sums[0], exact.dk), add_to(dk_sums[1], plain.dk);
        add_to(dv_sums[0], exact.dv), add_to(dv_sums[1], plain.dv);
      }
      if (!both) continue;
      const auto keys_of = [&](const std::vector<Element>& x) {
        return head_of(x, b, hk, c.seqlen_k, c.heads_kv, c.headdim);
      };
      e_dk.add(keys_of(dk_), dk_sums[0], dk_sums[1]);
      e_dv.add(keys_of(dv_), dv_sums[0], dv_sums[1]);
      if (!has_dkdv) continue;
      e_only_dk.add(keys_of(only_dk_), dk_sums[0], dk_sums[1]);
      e_only_dv.add(keys_of(only_dv_), dv_sums[0], dv_sums[1]);
    }
  CHECK_SAID(e_out.within(unit), name + " out: " + e_out.words());
  CHECK_SAID(e_lse.within(1e-6), name + " lse: " + e_lse.words());
  if (both) {
    CHECK_SAID(e_dq.within(unit), name + " dq: " + e_dq.words());
    CHECK_SAID(e_dk.within(unit), name + " dk: " + e_dk.words());
    CHECK_SAID(e_dv.within(unit), name + " dv: " + e_dv.words());
    if (has_dq) CHECK_SAID(e_only_dq.within(unit), name + " dq alone: " + e_only_dq.words());
    if (has_dkdv) CHECK_SAID(e_only_dk.within(unit), name + " dk without dq: " + e_only_dk.words());
    if (has_dkdv) CHECK_SAID(e_only_dv.within(unit), name + " dv without dq: " + e_only_dv.words());
  }
  std::printf("%s\n  out %s\n", name.c_str(), e_out.words().c_str());
  fah_plan_destroy(forward);
  fah_plan_destroy(backward);
}

// ------------------------------------------------------------------------------------------------------------ FP8

struct Recipe {
  fah_codes codes = FAH_DEFAULT_CODES;
  bool hadamard = true, smooth_k = true;
};

template <class Element>
fah_problem fp8_problem_of(const Case& c, int headdim_v, const Recipe& recipe) {
  fah_problem p = problem_of<Element>(c, FAH_FORWARD);
  p.headdim_v = headdim_v;
  p.precision = FAH_FP8;
  p.qk_codes = recipe.codes;
  p.hadamard = recipe.hadamard;
  p.smooth_k = recipe.smooth_k;
  return p;
}

// Of normal values, relative in the 2-norm, and of lse the root mean square: 1.15 times and 1.5 times the worst that an
// emulation of these very shapes has, without regard to the mask.
struct Fp8Bounds {
  double out, lse;
};
Fp8Bounds bounds_of(bool int8_qk) { return int8_qk ? Fp8Bounds{0.046, 0.005} : Fp8Bounds{0.065, 0.016}; }
// Sixteen bits have a tenth of it: who is below has not computed in eight.
constexpr double kLeastError = 0.02;

// Memory as the plan asks for it: of what need not be zero, every byte is set.
void prepare(const Buffer& workspace, const fah_workspace& need) { CUDA(cudaMemset(workspace.data(), 0, need.zeroed)); }

bool zero_again(const Buffer& workspace, const fah_workspace& need) {
  const auto bytes = workspace.get<unsigned char>();
  return std::all_of(bytes.begin(), bytes.begin() + need.zeroed, [](unsigned char x) { return x == 0; });
}

template <class Element>
void compare_fp8(const Case& c, const char* dtype, const Recipe& recipe = {}, int headdim_v = 0) {
  headdim_v = headdim_v ? headdim_v : c.headdim;
  constexpr const char* codes[] = {" fp8", " fp8 int8", " fp8 e4m3"};
  std::string name = name_of(c, dtype) + " Dv" + std::to_string(headdim_v) + codes[recipe.codes] +
                     (recipe.hadamard ? " hadamard" : "") + (recipe.smooth_k ? " smooth_k" : "");
  fah_plan* plan = nullptr;
  if (!plan_for(fp8_problem_of<Element>(c, headdim_v, recipe), &plan, name)) return;
  const bool int8_qk = test::contains(fah_plan_quantizer(plan), "int8_qk");
  if (recipe.codes == FAH_DEFAULT_CODES) {
    CHECK_SAID(int8_qk == (c.headdim > 192), name + ": " + fah_plan_quantizer(plan));
    name += int8_qk ? ", which is int8" : ", which is e4m3";
  }
  const size_t rows = size_t(c.batch) * c.seqlen_q * c.heads;
  // What all keys of a head have in common is what smooth_k takes away, and lse has all the same.
  const Operands<Element> in(c, headdim_v, recipe.smooth_k ? 2 : 0);
  Buffer out(rows * headdim_v * 2), lse(rows * 4), out_alone(rows * headdim_v * 2);
  fah_workspace w{};
  CHECK(fah_plan_workspace(plan, &w) == FAH_OK);
  Buffer workspace(w.bytes);
  prepare(workspace, w);
  fah_forward_args f{in.q_.data(), in.k_at, in.v_at, out.data(), lse.floats(), workspace.data()};
  CHECK_SAID(fah_forward(plan, &f, nullptr) == FAH_OK, name + ": " + fah_last_error());
  CUDA(cudaDeviceSynchronize());
  ran.insert(fah_plan_variant(plan));
  ran.insert(fah_plan_quantizer(plan));
  CHECK_SAID(zero_again(workspace, w), name + ": the workspace's first bytes are not zero again");
  f.out = out_alone.data();
  f.lse = nullptr;
  CHECK_SAID(fah_forward(plan, &f, nullptr) == FAH_OK, name + ": " + fah_last_error());
  CUDA(cudaDeviceSynchronize());
  CHECK_SAID(out.get<uint16_t>() == out_alone.get<uint16_t>(), name + ": a launch without lse differs");
  for (const Buffer* one : {&out, &lse, &out_alone, &workspace})
    CHECK_SAID(one->guarded(), name + ": written beside an output or the workspace");

  const auto out_ = out.get<Element>();
  const auto lse_ = lse.get<float>();
  const reference::Head head{c.seqlen_q, c.seqlen_k, c.headdim, headdim_v, c.window, 1 / std::sqrt(double(c.headdim))};
  double error = 0, size = 0, lse_error = 0;
  size_t seen = 0;
  bool finite = true;
  for (int b = 0; b < c.batch; ++b)
    for (int h = 0; h < c.heads; ++h) {
      const int hk = h / (c.heads / c.heads_kv);
      const reference::Result exact =
          reference::attention<Element>(head, head_of(in.q, b, h, c.seqlen_q, c.heads, c.headdim),
                                        head_of(in.k, b, hk, c.seqlen_k, c.heads_kv, c.headdim),
                                        head_of(in.v, b, hk, c.seqlen_k, c.heads_kv, headdim_v), {}, {}, true);
      const Doubles got = head_of(out_, b, h, c.seqlen_q, c.heads, headdim_v);
      for (size_t i = 0; i < got.size(); ++i) {
        finite &= std::isfinite(got[i]);
        error += (got[i] - exact.out[i]) * (got[i] - exact.out[i]);
        size += exact.out[i] * exact.out[i];
      }
      for (int i = 0; i < c.seqlen_q; ++i) {
        const double found = lse_[(size_t(b) * c.heads + h) * c.seqlen_q + i], wanted = exact.lse[i];
        if (std::isinf(wanted)) {
          finite &= found == wanted;
          continue;
        }
        finite &= std::isfinite(found);
        lse_error += (found - wanted) * (found - wanted);
        ++seen;
      }
    }
  error = std::sqrt(error / size);
  lse_error = std::sqrt(lse_error / double(seen));
  char words[120];
  std::snprintf(words, sizeof(words), "relative error of out %.4f, rms error of lse %.4f%s", error, lse_error,
                finite ? "" : ", NaN or inf in the wrong place");
  const Fp8Bounds most = bounds_of(int8_qk);
  CHECK_SAID(finite && error >= kLeastError && error <= most.out && lse_error <= most.lse, name + ": " + words);
  std::printf("%s\n  %s\n", name.c_str(), words);
  fah_plan_destroy(plan);
}

void fp8(const char* backend) {
  using cutlass::bfloat16_t;
  using cutlass::half_t;
  const reference::Window full{-1, -1}, causal{-1, 0}, window{100, 7};
  const auto first = [&](int headdim, reference::Window w) {
    return Case{backend, 2, 257, 257, 4, 2, headdim, w, true, false};
  };
  for (int headdim : {64, 128, 256})
    for (reference::Window w : {full, causal, window})
      for (const Case& c : {
               first(headdim, w),
               Case{backend, 1, 130, 400, 2, 2, headdim, w, false, true},
               Case{backend, 1, 300, 190, 2, 1, headdim, w, false, false},
               Case{backend, 1, 1100, 1100, 1, 1, headdim, w, false, false},
           })
        compare_fp8<bfloat16_t>(c, "bf16");
  compare_fp8<bfloat16_t>(first(96, causal), "bf16");
  compare_fp8<bfloat16_t>(first(192, causal), "bf16");
  compare_fp8<bfloat16_t>({backend, 2, 257, 257, 4, 2, 192, causal, false, false}, "bf16", {}, 128);
  const Recipe int8{FAH_INT8, true, true}, e4m3{FAH_E4M3, true, true};
  compare_fp8<bfloat16_t>(first(64, causal), "bf16", int8);
  compare_fp8<bfloat16_t>({backend, 1, 1100, 1100, 1, 1, 64, causal, false, false}, "bf16", int8);
  compare_fp8<bfloat16_t>(first(128, full), "bf16", int8);
  compare_fp8<bfloat16_t>(first(128, window), "bf16", int8);
  compare_fp8<bfloat16_t>(first(192, causal), "bf16", int8);
  compare_fp8<bfloat16_t>(first(128, full), "bf16", e4m3);
  compare_fp8<bfloat16_t>(first(256, causal), "bf16", e4m3);
  compare_fp8<half_t>(first(64, causal), "fp16");
  compare_fp8<half_t>(first(128, full), "fp16");
  compare_fp8<half_t>(first(128, full), "fp16", int8);
  // Parts of the recipe
  compare_fp8<bfloat16_t>(first(128, full), "bf16", {FAH_E4M3, false, false});
  compare_fp8<bfloat16_t>(first(128, full), "bf16", {FAH_INT8, false, false});
  compare_fp8<bfloat16_t>(first(64, causal), "bf16", {FAH_INT8, false, true});
  compare_fp8<bfloat16_t>(first(64, causal), "bf16", {FAH_INT8, true, false});
}

// A captured launch, replayed twice, gives what it gives outside of a graph.
void captured(const char* backend, fah_precision precision) {
  const Case c{backend, 2, 300, 300, 2, 1, 64, {-1, 0}, false, false};
  fah_problem problem = problem_of<cutlass::bfloat16_t>(c, FAH_FORWARD);
  problem.precision = precision;
  fah_plan* plan = nullptr;
  if (!plan_for(problem, &plan, "captured")) return;
  const Operands<cutlass::bfloat16_t> in(c, c.headdim, 0);
  Buffer out(in.q.size() * 2);
  fah_workspace w{};
  CHECK(fah_plan_workspace(plan, &w) == FAH_OK);
  Buffer workspace(w.bytes + 16);
  prepare(workspace, w);
  const fah_forward_args f{in.q_.data(), in.k_at, in.v_at, out.data(), nullptr, workspace.data()};
  cudaStream_t stream;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CUDA(cudaDeviceSynchronize());
  CHECK_SAID(fah_forward(plan, &f, stream) == FAH_OK, fah_last_error());
  CUDA(cudaStreamSynchronize(stream));
  const auto plain = out.get<uint16_t>();
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CHECK_SAID(fah_forward(plan, &f, stream) == FAH_OK, fah_last_error());
  CUDA(cudaStreamEndCapture(stream, &graph));
  CUDA(cudaGraphInstantiate(&executable, graph, 0));
  for (int i = 0; i < 2; ++i) {
    out.zero();
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaGraphLaunch(executable, stream));
    CUDA(cudaStreamSynchronize(stream));
    CHECK(out.get<uint16_t>() == plain);
  }
  CUDA(cudaGraphExecDestroy(executable));
  CUDA(cudaGraphDestroy(graph));
  CUDA(cudaStreamDestroy(stream));
  fah_plan_destroy(plan);
}

// Threads with a stream and a workspace each share one plan; all get what one gets alone.
void threads(const char* backend, fah_precision precision) {
  const Case c{backend, 2, 700, 700, 4, 4, 64, {-1, 0}, false, false};
  fah_problem problem = problem_of<cutlass::bfloat16_t>(c, FAH_FORWARD);
  problem.precision = precision;
  fah_plan* plan = nullptr;
  if (!plan_for(problem, &plan, "threads")) return;
  fah_workspace w{};
  CHECK(fah_plan_workspace(plan, &w) == FAH_OK);
  const size_t n = size_t(c.batch) * c.seqlen_q * c.heads * c.headdim;
  Buffer in(n * 2);
  in.put(numbers<cutlass::bfloat16_t>(n, 1));
  std::vector<std::vector<uint16_t>> results(4);
  std::vector<std::thread> crew;
  for (auto& result : results)
    crew.emplace_back([&] {
      Buffer out(n * 2), workspace(w.bytes + 16);
      prepare(workspace, w);
      CUDA(cudaDeviceSynchronize());
      cudaStream_t stream;
      CUDA(cudaStreamCreate(&stream));
      const fah_forward_args f{in.data(), in.data(), in.data(), out.data(), nullptr, workspace.data()};
      for (int i = 0; i < 20; ++i)
        if (fah_forward(plan, &f, stream) != FAH_OK) std::fprintf(stderr, "%s\n", fah_last_error());
      CUDA(cudaStreamSynchronize(stream));
      CUDA(cudaStreamDestroy(stream));
      result = out.get<uint16_t>();
    });
  for (auto& one : crew) one.join();
  for (const auto& result : results) CHECK(result == results[0]);
  fah_plan_destroy(plan);
}

// Microseconds of the host for one call of `launch`: printed as least and median over rounds of `calls` calls, few
// enough that the launch queue never fills. Returns the least.
template <class Launch>
double microseconds(const char* what, int calls, Launch launch) {
  std::vector<double> rounds(30);
  for (double& round : rounds) {
    CUDA(cudaDeviceSynchronize());
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) launch();
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    round = took.count() / calls;
  }
  CUDA(cudaDeviceSynchronize());
  std::sort(rounds.begin(), rounds.end());
  std::printf("host time of a %s call: %.2f us least, %.2f us median\n", what, rounds[0], rounds[rounds.size() / 2]);
  return rounds[0];
}

// What a call costs the host; the device's work is tiny. A backward is several launches.
void host_time(const char* backend) {
  const Case c{backend, 1, 128, 128, 1, 1, 64, {-1, 0}, false, false};
  fah_plan *forward = nullptr, *backward = nullptr;
  if (!plan_for(problem_of<cutlass::bfloat16_t>(c, FAH_FORWARD), &forward, "host time")) return;
  const size_t n = 128 * 64;
  Buffer in(n * 2), out(n * 2), lse(128 * 4), workspace(16);
  in.put(numbers<cutlass::bfloat16_t>(n, 1));
  workspace.zero();
  const fah_forward_args f{in.data(), in.data(), in.data(), out.data(), lse.floats(), workspace.data()};
  CHECK_SAID(fah_forward(forward, &f, nullptr) == FAH_OK, fah_last_error());
  CHECK(microseconds("forward", 200, [&] { fah_forward(forward, &f, nullptr); }) <= 5);
  fah_plan_destroy(forward);

  fah_plan* eight_bit = nullptr;
  if (plan_for(fp8_problem_of<cutlass::bfloat16_t>(c, c.headdim, {}), &eight_bit, "host time, FP8")) {
    fah_workspace need{};
    CHECK(fah_plan_workspace(eight_bit, &need) == FAH_OK);
    Buffer codes(need.bytes);
    prepare(codes, need);
    fah_forward_args g = f;
    g.workspace = codes.data();
    CHECK_SAID(fah_forward(eight_bit, &g, nullptr) == FAH_OK, fah_last_error());
    microseconds("FP8 forward", 100, [&] { fah_forward(eight_bit, &g, nullptr); });
    fah_plan_destroy(eight_bit);
  }

  if (!plan_for(problem_of<cutlass::bfloat16_t>(c, FAH_BACKWARD), &backward, "host time, backward")) return;
  fah_workspace w{};
  CHECK(fah_plan_workspace(backward, &w) == FAH_OK);
  Buffer dq(n * 2), dk(n * 2), dv(n * 2), sums(w.bytes);
  if (w.zeroed) sums.zero();
  const fah_backward_args b{in.data(), in.data(), in.data(), in.data(), out.data(), lse.floats(),
                            nullptr,   dq.data(), dk.data(), dv.data(), sums.data()};
  CHECK_SAID(fah_backward(backward, &b, nullptr) == FAH_OK, fah_last_error());
  microseconds("backward", 50, [&] { fah_backward(backward, &b, nullptr); });
  fah_plan_destroy(backward);
}

}  // namespace

// The argument is a backend; otherwise the one of the device.
int main(int words, char** word) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    std::puts("skipped: no GPU here");
    return test::kSkipped;
  }
  cudaDeviceProp device;
  CUDA(cudaGetDeviceProperties(&device, 0));
  const bool hopper = device.major == 9 && device.minor == 0;
  const char* backend = words > 1 ? word[1] : hopper ? "sm90" : "sm80";
  std::printf("%s, sm_%d%d, backend %s\n", device.name, device.major, device.minor, backend);
  for (int headdim : {64, 128})
    for (reference::Window window : {reference::Window{-1, -1}, {-1, 0}, {100, 7}})
      for (const Case& c : {
               Case{backend, 2, 257, 257, 4, 2, headdim, window, true, false},
               Case{backend, 1, 130, 400, 2, 2, headdim, window, false, true},
               Case{backend, 1, 300, 190, 2, 1, headdim, window, false, false},
               Case{backend, 1, 1100, 1100, 1, 1, headdim, window, false, false},
           }) {
        compare<cutlass::bfloat16_t>(c, "bf16", std::ldexp(1, -8));
        compare<cutlass::half_t>(c, "fp16", std::ldexp(1, -11));
      }
  const bool eight_bit = hopper && std::string(backend) == "sm90";
  if (eight_bit) fp8(backend);
  for (fah_precision precision : {FAH_16_BIT, FAH_FP8}) {
    if (precision == FAH_FP8 && !eight_bit) continue;
    threads(backend, precision);
    captured(backend, precision);
  }
  host_time(backend);
  for (const std::string& name : ran) std::printf("ran %s\n", name.c_str());
  for (const std::string& name : left_out) std::printf("not in this library: %s\n", name.c_str());
  CHECK(!ran.empty());
  return test::checked();
}
