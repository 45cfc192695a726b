// What reaches a kernel, without a GPU: its host half checks types, extents, strides and alignment of all operands
// before it turns to the device, so an error of CUDA means that all of them were accepted.
#include <set>
#include <string>

#include "check.hpp"
#include "error.hpp"
#include "launch.hpp"

namespace {

std::set<std::string> entered;  // quantizers

fah_problem problem_for(const fah::Kernel& kernel, const fah::Port& port, const fah::Choice& choice) {
  fah_problem p;
  fah_problem_init(&p);
  p.device = FAH_NO_ORDINAL;
  p.arch = port.capability;
  p.backend = kernel.backend;
  p.pass = kernel.pass == fah::Pass::fwd ? FAH_FORWARD : FAH_BACKWARD;
  const auto has = [&](fah::Feature feature) { return (choice.features & fah::bit(feature)) != 0; };
  const bool fp8 = choice.dtype == fah::DType::fp8;
  p.dtype = choice.dtype == fah::DType::fp16 || has(fah::Feature::fp16_out) ? FAH_FP16 : FAH_BF16;
  p.precision = fp8 ? FAH_FP8 : FAH_16_BIT;
  p.qk_codes = has(fah::Feature::int8_qk) ? FAH_INT8 : FAH_E4M3;
  p.gradients = static_cast<fah_gradients>(choice.wanted);
  p.batch = 2;
  p.seqlen_q = 200;
  p.seqlen_k = choice.min_seqlen > 300 ? choice.min_seqlen : 300;
  p.num_heads_q = 4;
  p.num_heads_kv = 2;
  p.headdim = choice.headdim;
  p.headdim_v = choice.headdim_v;
  p.deterministic = has(fah::Feature::deterministic);
  p.window_left = choice.mask == fah::Mask::window ? 50 : FAH_OPEN;
  p.window_right = choice.mask == fah::Mask::full ? FAH_OPEN : 0;
  const int64_t wide = 3 * p.num_heads_q * p.headdim;  // q inside a packed projection
  p.q_strides[0] = wide * p.seqlen_q;
  p.q_strides[1] = wide;
  p.q_strides[2] = p.headdim;
  return p;
}

// What the plan's kernel, or the variant that is named, says.
std::string enter(const fah_plan& plan, bool want_lse, const fah::Variant* variant = nullptr) {
  if (variant == nullptr) variant = &plan.choice->variant;
  const auto at = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
  float* floats = reinterpret_cast<float*>(at(4096));
  try {
    if (plan.pass == fah::Pass::fwd)
      fah::Call(plan, fah_forward_args{at(256), at(512), at(1024), at(2048), want_lse ? floats : nullptr, at(8192)})
          .enter(*variant);
    else
      fah::Call(plan, fah_backward_args{at(256), at(512), at(768), at(1024), at(1280), floats,
                                        want_lse ? floats : nullptr, at(2048), at(2304), at(2560), at(2816)})
          .enter(*variant);
    return "it ran";
  } catch (const fah::Error& error) {
    return error.message;
  }
}

bool there_is_a_device() {
  fah_problem p;
  fah_problem_init(&p);
  p.batch = p.seqlen_q = p.seqlen_k = p.num_heads_q = p.num_heads_kv = 1;
  p.headdim = 64;
  fah_plan* plan;
  const bool found = fah_plan_create(&p, &plan) != FAH_NO_DEVICE;
  fah_plan_destroy(plan);
  return found;
}

void accepted(const fah_plan& plan, const fah::Variant& variant) {
  for (bool want_lse : {true, false}) {
    const std::string said = enter(plan, want_lse, &variant);
    CHECK_SAID(test::contains(said, "cuda") || test::contains(said, "CUDA"), said);
    CHECK_SAID(!test::contains(said, "TypeError") && !test::contains(said, "ValueError"), said);
    CHECK_SAID(test::contains(said, std::string(variant.name) + ": "), said);
  }
}

// `accepted` can fail: operands that do not fit each other, and other dtypes, are found out.
void refused(fah_plan& plan, const fah::Variant& variant, fah::Layout& k, fah::Layout& v) {
  const auto said = [&] { return enter(plan, true, &variant); };
  k.shape[3] += 16;
  CHECK_SAID(test::contains(said(), "ValueError"), said());
  k.shape[3] -= 16;
  v.strides[1] += 1;
  CHECK_SAID(test::contains(said(), "ValueError"), said());
  v.strides[1] -= 1;
}

void other_dtype(fah_plan& plan, const fah::Variant& variant) {
  const auto flip = [&] { plan.dtype = plan.dtype == fah::DType::bf16 ? fah::DType::fp16 : fah::DType::bf16; };
  flip();
  CHECK_SAID(test::contains(enter(plan, true, &variant), "expected dtype"), enter(plan, true, &variant));
  flip();
}

// False where an FP8 plan's quantizer is not in the library.
bool planned(const fah_problem& problem, fah_plan& plan) {
  try {
    fah::make_plan(problem, plan);
    return true;
  } catch (const fah::Error& error) {
    CHECK_SAID(problem.precision == FAH_FP8 && error.status == FAH_NOT_IN_LIBRARY, error.message);
    return false;
  }
}

void called(const fah_problem& problem, const fah::Choice& choice) {
  fah_plan plan{};
  if (!planned(problem, plan)) return;
  CHECK_SAID(plan.choice->variant.name == std::string(choice.variant.name), choice.variant.name);
  plan.device = 0;
  plan.num_sms = 132;
  const fah::Variant& variant = choice.variant;
  accepted(plan, variant);
  if (!plan.quantizer) {
    refused(plan, variant, plan.k, plan.v);
    return other_dtype(plan, variant);
  }
  const fah::Variant& quantizer = plan.quantizer->variant;
  entered.insert(quantizer.name);
  accepted(plan, quantizer);
  refused(plan, quantizer, plan.k, plan.v);
  other_dtype(plan, quantizer);
  refused(plan, variant, plan.codes.k, plan.codes.v);
  plan.codes.int8_qk ^= true;
  CHECK_SAID(test::contains(enter(plan, true), "expected dtype"), enter(plan, true));
}

void called(const fah::Kernel& kernel, const fah::Port& port, const fah::Choice& choice) {
  fah_problem problem = problem_for(kernel, port, choice);
  if (problem.precision == FAH_16_BIT) return called(problem, choice);
  for (int recipe = 0; recipe < 4; ++recipe) {
    problem.hadamard = recipe & 1;
    problem.smooth_k = recipe >> 1;
    called(problem, choice);
  }
}

}  // namespace

int main() {
  if (there_is_a_device()) {
    std::puts("skipped: the addresses of this test must not reach a device");
    return test::kSkipped;
  }
  for (const fah::Kernel& kernel : fah::kernels())
    for (const fah::Port& port : kernel)
      for (const fah::Choice& choice : port)
        if (choice.variant.function != nullptr) called(kernel, port, choice);
  for (const fah::Quantizer& quantizer : fah::quantizers())
    if (quantizer.variant.function != nullptr)
      CHECK_SAID(entered.count(quantizer.variant.name), quantizer.variant.name);
  return test::checked();
}
