// A kernel that runs on request only, in a catalog of this test's own: the project's may have none.
#include <string>

#include "catalog.hpp"
#include "check.hpp"
#include "flashattn_hopper.h"

namespace fah {
namespace {

int never(void*, const TVMFFIAny*, int32_t, TVMFFIAny*) { return -1; }

constexpr Choice choice(const char* variant) {
  return {64, 64, DType::bf16, Mask::full, 0, Wanted::all, 1, "a tile", 0, 0, {variant, never, {Operand::q_}, 1}};
}

constexpr Choice kYoung[] = {choice("young variant")}, kOld[] = {choice("old variant")};
constexpr Port kYoungPorts[] = {{80, false, kYoung, 1}, {90, true, kYoung, 1}}, kOldPorts[] = {{90, true, kOld, 1}};
constexpr Kernel kKernels[] = {
    {"young.forward", "young", Pass::fwd, 3, 7, bit(Feature::gqa), 8, "it is young", kYoungPorts, 2},
    {"old.forward", "old", Pass::fwd, 3, 7, bit(Feature::gqa), 8, "", kOldPorts, 1},
};

}  // namespace

Rows<Kernel> kernels() { return {kKernels, kKernels + 2}; }
Rows<Quantizer> quantizers() { return {nullptr, nullptr}; }
int64_t padded_rows(int64_t seqlen_q) { return seqlen_q; }
int64_t key_tiles(int64_t) { return 1; }
int64_t tile_keys() { return 128; }
int64_t key_chunks(int64_t) { return 1; }

}  // namespace fah

namespace {

// The variant that is chosen, or why none is.
std::string planned(const char* backend, int arch, bool deterministic = false) {
  fah_problem p;
  fah_problem_init(&p);
  p.device = FAH_NO_ORDINAL;
  p.arch = arch;
  p.backend = backend;
  p.deterministic = deterministic;
  p.batch = p.seqlen_q = p.seqlen_k = p.num_heads_q = p.num_heads_kv = 1;
  p.headdim = 64;
  fah_plan* plan = nullptr;
  const fah_status status = fah_plan_create(&p, &plan);
  const std::string said = status == FAH_OK ? fah_plan_variant(plan) : fah_last_error();
  CHECK_SAID(status == FAH_OK || status == FAH_UNSUPPORTED, said);
  fah_plan_destroy(plan);
  return said;
}

void runs_only_by_name() {
  CHECK_SAID(planned("auto", 90) == "old variant", planned("auto", 90));
  CHECK_SAID(planned("young", 90) == "young variant", planned("young", 90));
  CHECK_SAID(planned("young", 80) == "young variant", planned("young", 80));
  CHECK_SAID(planned("auto", 80) ==
                 "no kernel runs fwd.bf16.d64.full on sm_80:\n"
                 "  young.forward: only with backend \"young\": it is young\n"
                 "  old.forward: needs sm_90, the device is sm_80",
             planned("auto", 80));
}

// What it could not run anyway is said first, and by name it refuses what it does not declare.
void other_reasons() {
  const std::string elsewhere = planned("auto", 75), undeclared = planned("young", 90, true);
  CHECK_SAID(test::contains(elsewhere, "young.forward: needs one of sm_80, sm_90, the device is sm_75"), elsewhere);
  CHECK_SAID(test::contains(undeclared, "young.forward: no deterministic"), undeclared);
}

}  // namespace

int main() {
  runs_only_by_name();
  other_reasons();
  return test::checked();
}
