// Plans and errors through the C interface, on any machine: every answer of the Python planner, and every refusal.
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "flashattn_hopper.h"

namespace {

fah_problem problem_on(int arch) {
  fah_problem p;
  fah_problem_init(&p);
  p.device = FAH_NO_ORDINAL;
  p.arch = arch;
  p.batch = 2;
  p.seqlen_q = p.seqlen_k = 2048;
  p.num_heads_q = 8;
  p.num_heads_kv = 2;
  p.headdim = 64;
  p.window_right = 0;
  return p;
}

struct Plan {
  explicit Plan(const fah_problem& problem) : status(fah_plan_create(&problem, &plan)) {
    if (status != FAH_OK) said = fah_last_error();
  }
  ~Plan() { fah_plan_destroy(plan); }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  fah_plan* plan = reinterpret_cast<fah_plan*>(1);
  fah_status status;
  std::string said;
};

using Change = std::function<void(fah_problem&)>;

void refused(fah_status expected, const std::string& part, const Change& change, int arch = 90) {
  fah_problem problem = problem_on(arch);
  change(problem);
  Plan made(problem);
  CHECK_SAID(made.status == expected, "wanted: " + part + "; got " + fah_status_name(made.status) + ": " + made.said);
  CHECK_SAID(test::contains(made.said, part), made.said + "; wanted: " + part);
  CHECK(made.plan == nullptr);
}

void bad_problems() {
  const auto invalid = [](const std::string& part, const Change& change) {
    refused(FAH_INVALID_ARGUMENT, part, change);
  };
  invalid("size is 0", [](auto& p) { p.size = 0; });
  invalid("pass is 7; expected FAH_FORWARD or FAH_BACKWARD", [](auto& p) { p.pass = static_cast<fah_pass>(7); });
  invalid("dtype is 0; expected FAH_BF16 or FAH_FP16", [](auto& p) { p.dtype = static_cast<fah_dtype>(0); });
  invalid("batch is 0; expected at least 1", [](auto& p) { p.batch = 0; });
  invalid("seqlen_q is -5", [](auto& p) { p.seqlen_q = -5; });
  invalid("seqlen_k is 0", [](auto& p) { p.seqlen_k = 0; });
  invalid("num_heads_q is 0", [](auto& p) { p.num_heads_q = 0; });
  invalid("num_heads_kv is 0", [](auto& p) { p.num_heads_kv = 0; });
  invalid("headdim is 0", [](auto& p) { p.headdim = 0; });
  invalid("headdim_v is -8", [](auto& p) { p.headdim_v = -8; });
  invalid("8 is not a multiple of 3", [](auto& p) { p.num_heads_kv = 3; });
  invalid("window_left is -2", [](auto& p) { p.window_left = -2; });
  invalid("window_right is -7", [](auto& p) { p.window_right = -7; });
  invalid("softmax_scale is -1", [](auto& p) { p.softmax_scale = -1; });
  invalid("softmax_scale is nan", [](auto& p) { p.softmax_scale = 0.0f / 0.0f * -1; });
  invalid("softmax_scale is inf", [](auto& p) { p.softmax_scale = 1e38f * 10; });
  invalid("device is -2", [](auto& p) { p.device = -2; });
  invalid("arch is 0; with FAH_NO_ORDINAL", [](auto& p) { p.arch = 0; });
  invalid("arch is 90; expected 0", [](auto& p) { p.device = 0; });
  invalid("backend \"sm75\" is not known", [](auto& p) { p.backend = "sm75"; });
  for (int dim = 0; dim < 3; ++dim) {
    const auto strides = [dim](auto& p, int64_t value) {
      const int64_t legal[3] = {2048 * 8 * 64, 8 * 64, 64};
      std::memcpy(p.q_strides, legal, sizeof(legal));
      p.q_strides[dim] = value;
    };
    invalid("q_strides: 100 elements", [&](auto& p) { strides(p, 100); });
    invalid("q_strides: -64 elements", [&](auto& p) { strides(p, -64); });
    invalid("q_strides: 549755813888 elements", [&](auto& p) { strides(p, int64_t{1} << 39); });
  }
  const int32_t most = std::numeric_limits<int32_t>::max();
  invalid("q has 6.33825e+29 elements", [&](auto& p) {
    p.batch = p.seqlen_q = p.num_heads_q = most;
    p.num_heads_kv = 1, p.headdim = 64;
  });
  invalid("k has ", [&](auto& p) { p.batch = p.seqlen_k = most, p.seqlen_q = 1; });
  invalid("precision is 2; expected FAH_16_BIT or FAH_FP8",
          [](auto& p) { p.precision = static_cast<fah_precision>(2); });
  invalid("qk_codes is 3; expected FAH_DEFAULT_CODES, FAH_INT8 or FAH_E4M3",
          [](auto& p) { p.qk_codes = static_cast<fah_codes>(3); });
  invalid("gradients is 3; expected FAH_DQ_DK_DV, FAH_DQ or FAH_DK_DV",
          [](auto& p) { p.gradients = static_cast<fah_gradients>(3); });
  const int64_t odd[3] = {64, 64, 63};
  invalid("k_strides: 63 elements", [&](auto& p) { std::memcpy(p.k_strides, odd, sizeof(odd)); });
  invalid("v_strides: 63 elements", [&](auto& p) { std::memcpy(p.v_strides, odd, sizeof(odd)); });
  invalid("dout_strides: 63 elements", [&](auto& p) { std::memcpy(p.dout_strides, odd, sizeof(odd)); });
}

void unsupported() {
  const auto no = [](const std::string& part, const Change& change, int arch = 90) {
    refused(FAH_UNSUPPORTED, part, change, arch);
  };
  no("sm90.forward: headdim 60, headdim_v 60: both must be multiples of 8", [](auto& p) { p.headdim = 60; });
  no("sm90.forward: headdim 512, headdim_v 512: at most 256 and 256", [](auto& p) { p.headdim = 512; });
  no("no kernel runs fwd.bf16.d64.causal.gqa on sm_75", [](auto&) {}, 75);
  no("sm90.forward: needs sm_90, the device is sm_80", [](auto& p) { p.backend = "sm90"; }, 80);
  no("sm80.forward: backend \"sm90\" was asked for", [](auto& p) { p.backend = "sm90"; }, 80);
  const auto fp8 = [&](const std::string& part, const Change& change, int arch = 90) {
    no(part, [&](auto& p) { p.precision = FAH_FP8, change(p); }, arch);
  };
  fp8(
      "no kernel runs fwd.fp8.d64.causal.gqa on sm_80:\n  sm80.forward: no fp8\n  sm90.forward_fp8: needs "
      "sm_90",
      [](auto&) {}, 80);
  fp8("fwd.fp8.d72.causal.fp16_out.gqa on sm_90", [](auto& p) { p.headdim = 72, p.dtype = FAH_FP16; });
  fp8("fwd.fp8.d72.causal.gqa.int8_qk on sm_90", [](auto& p) { p.headdim = 72, p.qk_codes = FAH_INT8; });
  fp8("fwd.fp8.d512.causal.gqa.int8_qk on sm_90", [](auto& p) { p.headdim = 512; });
  fp8("fwd.fp8.d512.causal.gqa on sm_90", [](auto& p) { p.headdim = 512, p.qk_codes = FAH_E4M3; });
  fp8("sm90.forward_fp8: headdim 72, headdim_v 72: both must be multiples of 16", [](auto& p) { p.headdim = 72; });
  fp8("sm90.backward: no fp8", [](auto& p) { p.pass = FAH_BACKWARD; });
  fp8("sm80.backward: no fp8", [](auto& p) { p.pass = FAH_BACKWARD; });
}

void not_in_library() {
  // At headdim 256 no preset but the largest has one.
  fah_problem p = problem_on(90);
  p.headdim = 256;
  Plan made(p);
  if (made.status == FAH_OK) return;
  CHECK(made.status == FAH_NOT_IN_LIBRARY);
  CHECK_SAID(test::contains(made.said, "sm_90a:sm90:fwd.bf16.d256.causal"), made.said);
  CHECK_SAID(test::contains(made.said, "FLASHATTN_HOPPER_VARIANTS"), made.said);
}

// The rotation of another head dimension is another, so the quantizer does not pad.
void quantizers_are_exact() {
  fah_problem p = problem_on(90);
  p.precision = FAH_FP8;
  p.headdim = 80;
  Plan made(p);
  CHECK_SAID(made.status == FAH_UNSUPPORTED, made.said);
  CHECK_SAID(test::contains(made.said,
                            "which would be quantize.bf16.d80.hadamard.smooth_k: sm90.quantize is "
                            "compiled ahead of time for d64, d96, d128, d192x128, d192, d256"),
             made.said);
}

void null_pointers() {
  fah_problem p = problem_on(90);
  fah_plan* plan = nullptr;
  fah_workspace workspace;
  const auto said = [](const char* part) { return test::contains(fah_last_error(), part); };
  fah_problem_init(nullptr);
  fah_plan_destroy(nullptr);
  CHECK(fah_plan_create(nullptr, &plan) == FAH_INVALID_ARGUMENT && said("problem is NULL"));
  CHECK(fah_plan_create(&p, nullptr) == FAH_INVALID_ARGUMENT && said("plan is NULL"));
  CHECK(fah_plan_workspace(nullptr, &workspace) == FAH_INVALID_ARGUMENT && said("plan is NULL"));
  CHECK(fah_forward(nullptr, nullptr, nullptr) == FAH_INVALID_ARGUMENT && said("plan is NULL"));
  CHECK(fah_backward(nullptr, nullptr, nullptr) == FAH_INVALID_ARGUMENT && said("plan is NULL"));
  CHECK(fah_plan_variant(nullptr) == nullptr && fah_plan_tile(nullptr) == nullptr);
  CHECK(fah_plan_quantizer(nullptr) == nullptr);
  Plan made(p);
  CHECK_SAID(made.status == FAH_OK, made.said);
  CHECK(fah_plan_quantizer(made.plan) == nullptr);
  CHECK(fah_plan_workspace(made.plan, nullptr) == FAH_INVALID_ARGUMENT && said("workspace is NULL"));
  CHECK(fah_forward(made.plan, nullptr, nullptr) == FAH_INVALID_ARGUMENT && said("args is NULL"));
}

// Every address, missing and then misaligned; at last a whole call, for which there is no device.
template <class Args, class Member>
void bad_addresses(fah_plan* plan, const Args& good, fah_status (*launch)(const fah_plan*, const Args*, void*),
                   const std::vector<std::pair<const char*, Member Args::*>>& members, bool optional) {
  for (const auto& [name, member] : members) {
    Args args = good;
    args.*member = nullptr;
    const fah_status without = launch(plan, &args, nullptr);
    if (!optional) {
      CHECK(without == FAH_INVALID_ARGUMENT);
      CHECK_SAID(std::string(fah_last_error()) == std::string(name) + " is NULL", fah_last_error());
    } else {
      CHECK_SAID(test::contains(fah_last_error(), "without a device"), fah_last_error());
    }
    args.*member = reinterpret_cast<Member>(reinterpret_cast<uintptr_t>(good.*member) + 2);
    CHECK(launch(plan, &args, nullptr) == FAH_INVALID_ARGUMENT);
    CHECK_SAID(test::contains(fah_last_error(), std::string(name) + ": its address is not a multiple of"),
               fah_last_error());
  }
  CHECK(launch(plan, &good, nullptr) == FAH_INVALID_ARGUMENT);
  CHECK_SAID(test::contains(fah_last_error(), "the plan was made without a device"), fah_last_error());
}

void launches_that_cannot_be() {
  const auto at = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
  const auto floats = [](uintptr_t address) { return reinterpret_cast<float*>(address); };
  fah_problem p = problem_on(90);
  Plan forward(p);
  p.pass = FAH_BACKWARD;
  Plan backward(p);
  CHECK_SAID(forward.status == FAH_OK, forward.said);
  CHECK_SAID(backward.status == FAH_OK, backward.said);
  if (forward.status != FAH_OK || backward.status != FAH_OK) return;
  const fah_forward_args f{at(256), at(512), at(1024), at(2048), floats(4096), at(8192)};
  bad_addresses<fah_forward_args, const void*>(
      forward.plan, f, fah_forward,
      {{"q", &fah_forward_args::q}, {"k", &fah_forward_args::k}, {"v", &fah_forward_args::v}}, false);
  bad_addresses<fah_forward_args, void*>(forward.plan, f, fah_forward,
                                         {{"out", &fah_forward_args::out}, {"workspace", &fah_forward_args::workspace}},
                                         false);
  bad_addresses<fah_forward_args, float*>(forward.plan, f, fah_forward, {{"lse", &fah_forward_args::lse}}, true);
  using B = fah_backward_args;
  const B b{at(256),      at(512),  at(768),  at(1024), at(1280), floats(1536),
            floats(1792), at(2048), at(2304), at(2560), at(2816)};
  bad_addresses<B, const void*>(backward.plan, b, fah_backward,
                                {{"dout", &B::dout}, {"q", &B::q}, {"k", &B::k}, {"v", &B::v}, {"out", &B::out}},
                                false);
  bad_addresses<B, void*>(backward.plan, b, fah_backward,
                          {{"dq", &B::dq}, {"dk", &B::dk}, {"dv", &B::dv}, {"workspace", &B::workspace}}, false);
  bad_addresses<B, const float*>(backward.plan, b, fah_backward, {{"lse", &B::lse}}, false);
  bad_addresses<B, const float*>(backward.plan, b, fah_backward, {{"dlse", &B::dlse}}, true);
  CHECK(fah_backward(forward.plan, &b, nullptr) == FAH_INVALID_ARGUMENT);
  CHECK_SAID(test::contains(fah_last_error(), "the plan is for the forward pass"), fah_last_error());
  CHECK(fah_forward(backward.plan, &f, nullptr) == FAH_INVALID_ARGUMENT);
  CHECK_SAID(test::contains(fah_last_error(), "the plan is for the backward pass"), fah_last_error());
}

void strides() {
  fah_problem p = problem_on(90);
  const int64_t packed[3] = {2048 * 12 * 64, 12 * 64, 64}, repeated[3] = {0, 64, 8}, odd[3] = {64, 64, 7};
  std::memcpy(p.q_strides, packed, sizeof(packed));
  std::memcpy(p.k_strides, repeated, sizeof(repeated));
  CHECK(Plan(p).status == FAH_OK);
  p.num_heads_q = p.num_heads_kv = 1;  // the stride of a single head means nothing
  std::memcpy(p.v_strides, odd, sizeof(odd));
  CHECK(Plan(p).status == FAH_OK);
}

void workspaces() {
  fah_problem p = problem_on(90);
  fah_workspace w{};
  Plan forward(p);
  CHECK(fah_plan_workspace(forward.plan, &w) == FAH_OK);
  CHECK(w.bytes == 8 && w.alignment == 16 && w.zeroed == 8);
  p.pass = FAH_BACKWARD;
  p.seqlen_q = 130;  // two times 128 rows
  Plan backward(p);
  CHECK(fah_plan_workspace(backward.plan, &w) == FAH_OK);
  CHECK(w.bytes == (size_t{2} * 8 * 256 * (2 + 64) + 4) * sizeof(float) && !w.zeroed);
  p.deterministic = 1;
  p.window_right = FAH_OPEN;
  Plan in_turn(p);  // a counter for each row
  if (in_turn.status == FAH_NOT_IN_LIBRARY) return;
  CHECK(fah_plan_workspace(in_turn.plan, &w) == FAH_OK);
  CHECK(w.bytes == (size_t{2} * 8 * 256 * (2 + 64 + 1) + 4) * sizeof(float) && !w.zeroed);
}

// As Python's: what the plan has, or what it says that this library lacks.
void default_codes() {
  const struct {
    int headdim;
    const char *codes, *variant, *quantizer;
  } wanted[] = {
      {64, "", "sm_90a:sm90:fwd.fp8.d64.causal", "sm_90a:sm90:quantize.bf16.d64.hadamard.smooth_k"},
      {96, "", "sm_90a:sm90:fwd.fp8.d96.causal", "sm_90a:sm90:quantize.bf16.d96.hadamard.smooth_k"},
      {128, "", "sm_90a:sm90:fwd.fp8.d128.causal", "sm_90a:sm90:quantize.bf16.d128.hadamard.smooth_k"},
      {192, "", "sm_90a:sm90:fwd.fp8.d192.causal", "sm_90a:sm90:quantize.bf16.d192.hadamard.smooth_k"},
      {256, ".int8_qk", "sm_90a:sm90:fwd.fp8.d256.causal.int8_qk",
       "sm_90a:sm90:quantize.bf16.d256.hadamard.int8_qk.smooth_k"},
  };
  for (const auto& one : wanted) {
    fah_problem p = problem_on(90);
    CHECK(p.qk_codes == FAH_DEFAULT_CODES);
    p.precision = FAH_FP8;
    p.headdim = one.headdim;
    const Plan made(p);
    if (made.status == FAH_NOT_IN_LIBRARY) {
      const bool forward = test::contains(made.said, std::string(" is ") + one.variant + " (");
      CHECK_SAID(forward || test::contains(made.said, std::string(" needs ") + one.quantizer + ","), made.said);
      continue;
    }
    CHECK_SAID(made.status == FAH_OK, made.said);
    if (made.status != FAH_OK) continue;
    CHECK_SAID(std::string(fah_plan_variant(made.plan)) == one.variant, fah_plan_variant(made.plan));
    CHECK_SAID(std::string(fah_plan_quantizer(made.plan)) == one.quantizer, fah_plan_quantizer(made.plan));
  }
}

// Where codes lie, and what a launch asks for, where this library has FP8.
void fp8_plans() {
  fah_problem p = problem_on(90);
  p.precision = FAH_FP8;
  p.seqlen_q = 130;
  p.seqlen_k = 300;  // three tiles of 128 keys
  Plan made(p);
  if (made.status == FAH_NOT_IN_LIBRARY) {
    CHECK_SAID(test::contains(made.said, "fwd.fp8.d64.causal"), made.said);
    return;
  }
  CHECK_SAID(made.status == FAH_OK, made.said);
  if (made.status != FAH_OK) return;
  fah_workspace w{};
  CHECK(fah_plan_workspace(made.plan, &w) == FAH_OK);
  CHECK(w.alignment == 128 && w.zeroed == 256);  // tickets; a counter for each of 2 x 2 heads
  const size_t codes = 2 * 130 * 8 * 64 + 2 * 300 * 2 * 64 + 2 * 2 * 64 * 384;
  CHECK_SAID(w.bytes > codes && w.bytes < codes + 64 * 1024, std::to_string(w.bytes));
  const auto at = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
  using F = fah_forward_args;
  const F f{at(256), at(512), at(1024), at(2048), static_cast<float*>(at(4096)), at(8192)};
  bad_addresses<F, const void*>(made.plan, f, fah_forward, {{"q", &F::q}, {"k", &F::k}, {"v", &F::v}}, false);
  bad_addresses<F, void*>(made.plan, f, fah_forward, {{"out", &F::out}, {"workspace", &F::workspace}}, false);
  bad_addresses<F, float*>(made.plan, f, fah_forward, {{"lse", &F::lse}}, true);
  F off = f;
  off.workspace = at(8192 + 16);
  CHECK(fah_forward(made.plan, &off, nullptr) == FAH_INVALID_ARGUMENT);
  CHECK_SAID(test::contains(fah_last_error(), "workspace: its address is not a multiple of 128"), fah_last_error());
  CHECK(fah_backward(made.plan, nullptr, nullptr) == FAH_INVALID_ARGUMENT);
  p.qk_codes = FAH_INT8;
  p.hadamard = p.smooth_k = 0;
  Plan plain(p);
  const char* quantizer = plain.status == FAH_OK ? fah_plan_quantizer(plain.plan) : plain.said.c_str();
  CHECK_SAID(test::contains(quantizer, "fwd.fp8.d64.causal.gqa.int8_qk on sm_90 is ") ||
                 test::contains(quantizer, "quantize.bf16.d64.int8_qk"),
             quantizer);
}

// Gradients that are not computed need no memory.
void some_gradients() {
  const auto at = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
  const auto floats = [](uintptr_t address) { return reinterpret_cast<float*>(address); };
  const fah_backward_args none{at(256), at(512), at(768), at(1024), at(1280), floats(1536),
                               nullptr, nullptr, nullptr, nullptr,  at(2816)};
  int found = 0;
  for (fah_gradients gradients : {FAH_DQ_DK_DV, FAH_DQ, FAH_DK_DV})
    for (int64_t right : {int64_t{FAH_OPEN}, int64_t{0}}) {
      fah_problem p = problem_on(90);
      p.pass = FAH_BACKWARD;
      p.window_right = right;
      p.gradients = gradients;
      Plan made(p);
      const char* part = gradients == FAH_DQ ? ":dq" : ":dkdv";
      if (made.status == FAH_NOT_IN_LIBRARY)
        CHECK_SAID(gradients == FAH_DQ_DK_DV || test::contains(made.said, part), made.said);
      if (made.status != FAH_OK) continue;
      CHECK(gradients == FAH_DQ_DK_DV || test::contains(fah_plan_variant(made.plan), part));
      fah_backward_args b = none;
      const auto said = [&] { return fah_backward(made.plan, &b, nullptr), std::string(fah_last_error()); };
      if (gradients != FAH_DK_DV) CHECK(said() == "dq is NULL"), b.dq = at(2048);
      if (gradients != FAH_DQ) {
        CHECK(said() == "dk is NULL");
        b.dk = at(2304);
        CHECK(said() == "dv is NULL");
        b.dv = at(2560);
      }
      CHECK_SAID(test::contains(said(), "without a device"), said());
      ++found;
    }
  CHECK(found >= 1);
}

void no_device() {
  fah_problem p = problem_on(0);
  p.device = 9999;
  Plan made(p);
  CHECK(made.status == FAH_NO_DEVICE);
  CHECK_SAID(test::contains(made.said, "no CUDA device"), made.said);
}

// As Python's planner: the cases that flashattn_hopper/native.py wrote.
void as_the_catalog_says(const char* file) {
  std::ifstream lines(file);
  std::string line;
  int read = 0, planned = 0, fp8 = 0, left_out = 0;
  while (std::getline(lines, line)) {
    std::istringstream fields(line);
    std::vector<std::string> f;
    for (std::string field; std::getline(fields, field, '\t');) f.push_back(field);
    CHECK_SAID(f.size() == 19, line);
    if (f.size() != 19) return;
    ++read;
    fah_problem p = problem_on(std::stoi(f[0]));
    p.backend = f[1].c_str();
    p.pass = f[2] == "fwd" ? FAH_FORWARD : FAH_BACKWARD;
    p.dtype = f[3] == "bf16" ? FAH_BF16 : FAH_FP16;
    p.headdim = std::stoi(f[4]);
    p.headdim_v = std::stoi(f[5]);
    p.window_left = f[6] == "window" ? 100 : FAH_OPEN;
    p.window_right = f[6] == "full" ? FAH_OPEN : 0;
    p.deterministic = std::stoi(f[7]);
    p.gradients = f[8] == "all" ? FAH_DQ_DK_DV : f[8] == "dq" ? FAH_DQ : FAH_DK_DV;
    p.precision = f[9] == "-" ? FAH_16_BIT : FAH_FP8;
    p.hadamard = test::contains(f[9], "hadamard");
    p.smooth_k = test::contains(f[9], "smooth_k");
    p.qk_codes = test::contains(f[9], "int8_qk")   ? FAH_INT8
                 : test::contains(f[9], "e4m3_qk") ? FAH_E4M3
                                                   : FAH_DEFAULT_CODES;
    p.batch = std::stoi(f[10]);
    p.seqlen_q = std::stoi(f[11]);
    p.seqlen_k = std::stoi(f[12]);
    p.num_heads_q = std::stoi(f[13]);
    p.num_heads_kv = std::stoi(f[14]);
    const std::string &variant = f[15], &tile = f[16], &quantizer = f[17], &bytes = f[18];
    Plan made(p);
    if (variant == "-") {
      CHECK_SAID(made.status == FAH_UNSUPPORTED, line + ": " + made.said);
    } else if (made.status == FAH_NOT_IN_LIBRARY) {
      ++left_out;
      const bool named = test::contains(made.said, " is " + variant + " (" + tile + ")") ||
                         (quantizer != "-" && test::contains(made.said, " needs " + quantizer + ","));
      CHECK_SAID(named, line + ": " + made.said);
    } else {
      ++planned;
      fp8 += p.precision == FAH_FP8;
      CHECK_SAID(made.status == FAH_OK, line + ": " + made.said);
      CHECK_SAID(made.plan && variant == fah_plan_variant(made.plan) && tile == fah_plan_tile(made.plan), line);
      const char* found = fah_plan_quantizer(made.plan);
      CHECK_SAID(quantizer == (found ? found : "-"), line);
      fah_workspace w{};
      fah_plan_workspace(made.plan, &w);
      CHECK_SAID(w.bytes == std::stoull(bytes) && w.zeroed <= w.bytes, line + ": " + std::to_string(w.bytes));
    }
  }
  std::printf("%d cases: %d planned, %d of them FP8, %d not in this library\n", read, planned, fp8, left_out);
  CHECK(read > 1000 && planned + left_out > 100);
}

void library_is_listed() {
  size_t n = 0;
  bool forward = false;
  for (; const char* name = fah_library_variant(n); ++n) forward |= test::contains(name, ":fwd.");
  std::printf("%zu variants are linked\n", n);
  CHECK(n > 0 && forward && fah_library_variant(n + 1) == nullptr);
}

void threads() {
  std::vector<std::thread> crew;
  std::vector<int> wrong(8);
  for (int t = 0; t < 8; ++t)
    crew.emplace_back([t, &wrong] {
      for (int i = 0; i < 200; ++i) {
        fah_problem p = problem_on(90);
        Plan good(p);
        p.batch = -t - 1;
        Plan bad(p);
        wrong[t] += good.status != FAH_OK || bad.said != "batch is " + std::to_string(-t - 1) + "; expected at least 1";
      }
    });
  for (auto& one : crew) one.join();
  for (int count : wrong) CHECK(count == 0);
}

}  // namespace

int main(int count, char** words) {
  if (count != 2) return std::fprintf(stderr, "usage: test_plan cases.tsv\n"), 2;
  CHECK(std::string(fah_last_error()).empty());
  CHECK(std::string(fah_status_name(FAH_NO_DEVICE)) == "FAH_NO_DEVICE");
  bad_problems();
  unsupported();
  not_in_library();
  quantizers_are_exact();
  null_pointers();
  launches_that_cannot_be();
  strides();
  workspaces();
  default_codes();
  fp8_plans();
  some_gradients();
  no_device();
  library_is_listed();
  threads();
  as_the_catalog_says(words[1]);
  return test::checked();
}
