// How the library talks to the driver, with fake_driver.c in its place: devices found and missing, contexts, and an
// error of the CUDA runtime, which that driver is too little for. The last argument is a scenario.
#include <dlfcn.h>

#include <cstdlib>
#include <string>

#include "check.hpp"
#include "flashattn_hopper.h"

namespace {

fah_problem problem_on(int device) {
  fah_problem p;
  fah_problem_init(&p);
  p.device = device;
  p.batch = p.num_heads_q = p.num_heads_kv = 1;
  p.seqlen_q = p.seqlen_k = 2048;
  p.headdim = 64;
  p.window_right = 0;
  return p;
}

void refused(int device, const std::string& said) {
  fah_plan* plan = nullptr;
  const fah_problem p = problem_on(device);
  CHECK(fah_plan_create(&p, &plan) == FAH_NO_DEVICE && plan == nullptr);
  CHECK_SAID(fah_last_error() == said, fah_last_error());
}

int count_of(const char* name) { return *static_cast<int*>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), name)); }

// `first`: the variant whose launch fails, of those that a call makes the first.
void launched(fah_precision precision, const std::string& first, int calls_before, int pushes) {
  fah_plan* plan = nullptr;
  fah_problem p = problem_on(0);
  p.precision = precision;
  const fah_status made = fah_plan_create(&p, &plan);
  if (precision == FAH_FP8 && made == FAH_NOT_IN_LIBRARY) return;
  CHECK_SAID(made == FAH_OK, fah_last_error());
  if (plan == nullptr) return;
  CHECK(std::string(fah_plan_variant(plan)).rfind("sm_90a:sm90:", 0) == 0);
  alignas(128) static char memory[128];
  const fah_forward_args f{memory, memory, memory, memory, nullptr, memory};
  for (int i = 0; i < 2; ++i) {  // a failed launch leaves no lock behind
    CHECK(fah_forward(plan, &f, nullptr) == FAH_CUDA_ERROR);
    CHECK_SAID(test::contains(fah_last_error(), "sm_90a:sm90:" + first + ": "), fah_last_error());
  }
  const int calls = (calls_before + 2) * pushes;
  CHECK(count_of("fake_pushed") == calls && count_of("fake_popped") == calls);
  CHECK(count_of("fake_retained") == pushes);
  fah_plan_destroy(plan);
}

void launches(int pushes) {
  launched(FAH_16_BIT, "fwd.bf16.d64.causal", 0, pushes);
  launched(FAH_FP8, "quantize.bf16.d64.hadamard.smooth_k", 2, pushes);
}

}  // namespace

int main(int count, char** words) {
  const std::string scenario = count > 1 ? words[1] : "";
  if (scenario == "none") {
    refused(0, "no CUDA device: the driver reports none");
  } else if (scenario == "init") {
    refused(0, "no CUDA device: cuInit: no device at all (CUDA error 100)");
    refused(0, "no CUDA device: cuInit: no device at all (CUDA error 100)");  // asked again
  } else if (scenario == "one") {
    refused(1, "no CUDA device 1: there are 1");
    launches(1);
  } else if (scenario == "current") {
    launches(0);
  } else {
    return std::fprintf(stderr, "no scenario \"%s\"\n", scenario.c_str()), 2;
  }
  return test::checked();
}
