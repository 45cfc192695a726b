// What reaches a kernel, without a GPU: its host half checks types, extents, strides and alignment of all operands
// before it turns to the device, so an error of CUDA means that all of them were accepted.
#include <string>
#include <vector>

#include "check.hpp"
#include "error.hpp"
#include "launch.hpp"

namespace {

fah_problem problem_for(const fah::Kernel& kernel, const fah::Port& port, const fah::Choice& choice) {
  fah_problem p;
  fah_problem_init(&p);
  p.device = FAH_NO_ORDINAL;
  p.arch = port.capability;
  p.backend = kernel.backend;
  p.pass = kernel.pass == fah::Pass::fwd ? FAH_FORWARD : FAH_BACKWARD;
  p.dtype = choice.dtype == fah::DType::bf16 ? FAH_BF16 : FAH_FP16;
  p.batch = 2;
  p.seqlen_q = 200;
  p.seqlen_k = choice.min_seqlen > 300 ? choice.min_seqlen : 300;
  p.num_heads_q = 4;
  p.num_heads_kv = 2;
  p.headdim = choice.headdim;
  p.headdim_v = choice.headdim_v;
  p.deterministic = choice.deterministic;
  p.window_left = choice.mask == fah::Mask::window ? 50 : FAH_OPEN;
  p.window_right = choice.mask == fah::Mask::full ? FAH_OPEN : 0;
  const int64_t wide = 3 * p.num_heads_q * p.headdim;  // q inside a packed projection
  p.q_strides[0] = wide * p.seqlen_q;
  p.q_strides[1] = wide;
  p.q_strides[2] = p.headdim;
  return p;
}

std::string enter(const fah_plan& plan, bool want_lse) {
  const auto at = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
  float* floats = reinterpret_cast<float*>(at(4096));
  try {
    if (plan.pass == fah::Pass::fwd)
      fah::Call(plan, fah_forward_args{at(256), at(512), at(1024), at(2048), want_lse ? floats : nullptr, at(8192)})
          .enter();
    else
      fah::Call(plan, fah_backward_args{at(256), at(512), at(768), at(1024), at(1280), floats,
                                        want_lse ? floats : nullptr, at(2048), at(2304), at(2560), at(2816)})
          .enter();
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

void called(const fah::Kernel& kernel, const fah::Port& port, const fah::Choice& choice) {
  fah_plan plan{};
  fah::make_plan(problem_for(kernel, port, choice), plan);
  CHECK_SAID(plan.choice->variant == std::string(choice.variant), choice.variant);
  plan.device = 0;
  plan.num_sms = 132;
  for (bool want_lse : {true, false}) {
    const std::string said = enter(plan, want_lse);
    CHECK_SAID(test::contains(said, "cuda") || test::contains(said, "CUDA"), said);
    CHECK_SAID(!test::contains(said, "TypeError") && !test::contains(said, "ValueError"), said);
  }
  // The check above can fail: operands that do not fit each other are found out.
  plan.k.shape[3] += 8;
  CHECK_SAID(test::contains(enter(plan, true), "ValueError"), enter(plan, true));
  plan.k.shape[3] -= 8;
  plan.v.strides[1] += 1;
  CHECK_SAID(test::contains(enter(plan, true), "ValueError"), enter(plan, true));
  plan.v.strides[1] -= 1;
  plan.dtype = plan.dtype == fah::DType::bf16 ? fah::DType::fp16 : fah::DType::bf16;
  CHECK_SAID(test::contains(enter(plan, true), "expected dtype"), enter(plan, true));
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
        if (choice.function != nullptr) called(kernel, port, choice);
  return test::checked();
}
