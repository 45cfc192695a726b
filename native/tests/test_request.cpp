// A catalog of this test's own: a kernel that runs on request only, of which the project's may have none, and an FP8
// forward and quantizers that note down what they are passed.
#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "catalog.hpp"
#include "check.hpp"
#include "flashattn_hopper.h"
#include "launch.hpp"

namespace fah {
namespace {

int never(void*, const TVMFFIAny*, int32_t, TVMFFIAny*) { return -1; }

// What the latest calls were passed, in their order: integers and, of tensors, their addresses.
struct Passed {
  std::vector<TVMFFIAny> values;
  std::vector<DLTensor> tensors;  // one for each value; of no use where that is none
};
std::vector<Passed> calls;

int note(void*, const TVMFFIAny* arguments, int32_t, TVMFFIAny*) {
  const auto* cell = reinterpret_cast<const TVMFFISeqCell*>(arguments->v_obj + 1);
  const auto* values = static_cast<const TVMFFIAny*>(cell->data);
  Passed passed{{values, values + cell->size}, {}};
  for (const TVMFFIAny& value : passed.values)
    passed.tensors.push_back(value.type_index == kTVMFFIDLTensorPtr ? *static_cast<DLTensor*>(value.v_ptr)
                                                                    : DLTensor{});
  calls.push_back(passed);
  return 0;
}

constexpr Choice choice(const char* variant) {
  return {64, 64, DType::bf16, Mask::full, 0, Wanted::all, 1, "a tile", 0, 0, {variant, never, {Operand::q_}, 1}};
}

constexpr Choice kYoung[] = {choice("young variant")}, kOld[] = {choice("old variant")};

constexpr Variant kAttention = {
    "eight",
    note,
    {Operand::q_codes_, Operand::k_codes_, Operand::v_codes_, Operand::o_, Operand::lse_, Operand::tickets_,
     Operand::q_descale_, Operand::k_descale_, Operand::v_descale_, Operand::logit_offset_, Operand::restored_lse_},
    11};
constexpr Choice kEight[] = {
    {64, 64, DType::fp8, Mask::full, bit(Feature::int8_qk), Wanted::all, 1, "a tile", 0, 0, kAttention}};

constexpr Quantizer quantizer(const char* name, bool smooth_k) {
  const Operand mean = smooth_k ? Operand::k_mean_ : Operand::none;
  const Operand offset = smooth_k ? Operand::logit_offset_ : Operand::none;
  const Variant variant{
      name,
      note,
      {Operand::q_, Operand::k_, Operand::v_, Operand::q8_, Operand::k8_, Operand::v8_, Operand::q_descale_,
       Operand::k_descale_, Operand::v_descale_, mean, offset, Operand::workspace_, Operand::counters_},
      13};
  return {64, 64, DType::bf16, true, smooth_k, true, variant};
}
constexpr Quantizer kQuantizers[] = {quantizer("smooth", true), quantizer("rough", false)};

constexpr Port kYoungPorts[] = {{80, false, kYoung, 1}, {90, true, kYoung, 1}}, kOldPorts[] = {{90, true, kOld, 1}},
               kEightPorts[] = {{90, true, kEight, 1}};
constexpr Kernel kKernels[] = {
    {"young.forward", "young", Pass::fwd, 3, 7, bit(Feature::gqa), 8, "it is young", kYoungPorts, 2},
    {"old.forward", "old", Pass::fwd, 3, 7, bit(Feature::gqa), 8, "", kOldPorts, 1},
    {"old.forward_fp8", "old", Pass::fwd, 4, 7, bit(Feature::int8_qk), 16, "", kEightPorts, 1},
};

}  // namespace

Rows<Kernel> kernels() { return {kKernels, kKernels + 3}; }
Rows<Quantizer> quantizers() { return {kQuantizers, kQuantizers + 2}; }
bool int8_by_default(int) { return true; }
int64_t padded_rows(int64_t seqlen_q) { return seqlen_q; }
int64_t tile_keys() { return 128; }
int64_t key_tiles(int64_t seqlen_k) { return (seqlen_k + 127) / 128; }
int64_t key_chunks(int64_t seqlen_k) { return std::min<int64_t>((seqlen_k + 127) / 128, 64); }

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

using fah::Operand;

const fah::Variant& variant_of(const fah_plan& plan, size_t call) {
  return call == 0 ? plan.quantizer->variant : plan.choice->variant;
}

// What call 0, the quantizer, or 1, the attention kernel, was passed as `operand`.
std::pair<TVMFFIAny, DLTensor> passed(const fah_plan& plan, size_t call, Operand operand) {
  const fah::Variant& variant = variant_of(plan, call);
  const auto* found = std::find(variant.operands, variant.operands + variant.num_operands, operand);
  const size_t place = size_t(found - variant.operands);
  return {fah::calls[call].values[place], fah::calls[call].tensors[place]};
}

int64_t number(const fah_plan& plan, size_t call, Operand operand) {
  const TVMFFIAny value = passed(plan, call, operand).first;
  CHECK(value.type_index == kTVMFFIInt);
  return value.v_int64;
}

// The quantizer is called first, and what it writes is what the attention kernel reads; all of it is in the workspace,
// each in a place of its own.
void codes_are_handed_on(bool smooth_k, bool want_lse) {
  fah_problem p;
  fah_problem_init(&p);
  p.device = FAH_NO_ORDINAL;
  p.arch = 90;
  p.precision = FAH_FP8;
  p.smooth_k = smooth_k;
  p.batch = 3;
  p.seqlen_q = 100;
  p.seqlen_k = 300;
  p.num_heads_q = p.num_heads_kv = 5;
  p.headdim = 64;
  fah_plan plan{};
  fah::make_plan(p, plan);
  CHECK(fah_plan_quantizer(&plan) == std::string(smooth_k ? "smooth" : "rough"));
  const int64_t workspace = 1 << 20, lse = 4096;
  const auto at = [](int64_t address) { return reinterpret_cast<void*>(address); };
  const fah_forward_args args{
      at(256), at(512), at(1024), at(2048), static_cast<float*>(want_lse ? at(lse) : nullptr), at(workspace)};
  fah::calls.clear();
  fah::Call(plan, args).enter();
  CHECK(fah::calls.size() == 2);
  if (fah::calls.size() != 2) return;
  for (const auto& [operand, address] : {std::pair{Operand::q_, 256}, {Operand::k_, 512}, {Operand::v_, 1024}}) {
    const DLTensor tensor = passed(plan, 0, operand).second;
    CHECK(tensor.data == at(address) && tensor.dtype.code == kDLBfloat && tensor.dtype.bits == 16);
  }
  for (const auto& [codes, made] : {std::pair{Operand::q_codes_, Operand::q8_},
                                    {Operand::k_codes_, Operand::k8_},
                                    {Operand::v_codes_, Operand::v8_}}) {
    const DLTensor tensor = passed(plan, 1, codes).second;
    CHECK(tensor.data == at(number(plan, 0, made)) && tensor.dtype.bits == 8);
    CHECK(tensor.dtype.code == (codes == Operand::v_codes_ ? kDLFloat8_e4m3fn : kDLInt));
  }
  const auto shape = passed(plan, 1, Operand::v_codes_).second.shape;
  CHECK(std::vector<int64_t>(shape, shape + 4) == std::vector<int64_t>({3, 5, 64, 384}));
  for (Operand scale : {Operand::q_descale_, Operand::k_descale_, Operand::v_descale_})
    CHECK(number(plan, 0, scale) == number(plan, 1, scale));
  const int64_t offset = number(plan, 1, Operand::logit_offset_);
  CHECK(offset == (smooth_k ? number(plan, 0, Operand::logit_offset_) : 0));
  CHECK(number(plan, 1, Operand::lse_) == 0 && number(plan, 1, Operand::restored_lse_) == (want_lse ? lse : 0));
  CHECK(number(plan, 1, Operand::o_) == 2048);

  // Bytes that each must have, by its address.
  std::map<int64_t, int64_t> places = {
      {number(plan, 1, Operand::tickets_), 8},
      {number(plan, 0, Operand::counters_), 3 * 5 * 4},
      {number(plan, 0, Operand::q8_), 3 * 5 * 100 * 64},
      {number(plan, 0, Operand::k8_), 3 * 5 * 300 * 64},
      {number(plan, 0, Operand::v8_), 3 * 5 * 64 * 384},
      {number(plan, 0, Operand::q_descale_), 3 * 5 * 100 * 4},
      {number(plan, 0, Operand::k_descale_), 3 * 5 * 3 * 4},
      {number(plan, 0, Operand::v_descale_), 3 * 5 * 4},
      {number(plan, 0, Operand::workspace_), 4 * (48 + 3 * 5 * 3 * 64)},
  };
  if (smooth_k) {
    places[number(plan, 0, Operand::k_mean_)] = 3 * 5 * 64 * 4;
    places[offset] = 3 * 5 * 100 * 4;
  } else {
    CHECK(fah::calls[0].values[9].type_index == kTVMFFINone && fah::calls[0].values[10].type_index == kTVMFFINone);
  }
  CHECK(places.size() == (smooth_k ? 11 : 9));
  int64_t end = workspace;
  for (const auto& [address, bytes] : places) {
    CHECK(address >= end && address % 128 == 0);
    end = address + bytes;
  }
  CHECK(end <= workspace + int64_t(plan.workspace.bytes));
  const int64_t zeroed = workspace + int64_t(plan.workspace.zeroed);
  CHECK(number(plan, 1, Operand::tickets_) + 8 <= zeroed && number(plan, 0, Operand::counters_) + 60 <= zeroed);
  CHECK(number(plan, 0, Operand::q8_) >= zeroed);
}

}  // namespace

int main() {
  runs_only_by_name();
  other_reasons();
  for (bool smooth_k : {true, false})
    for (bool want_lse : {true, false}) codes_are_handed_on(smooth_k, want_lse);
  return test::checked();
}
