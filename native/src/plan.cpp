#include "plan.hpp"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <iterator>
#include <string>

#include "driver.hpp"
#include "error.hpp"

namespace fah {
namespace {

constexpr int64_t kAlignment = 8;                  // elements of 16 bits: 16 bytes
constexpr int64_t kMostStride = int64_t{1} << 39;  // elements: 2^40 bytes
constexpr size_t kKeptAlignment = 128;             // bytes, of what is kept in a workspace: KEPT of native.py
constexpr const char* kDTypes[] = {"bf16", "fp16", "fp8"};
constexpr const char* kMasks[] = {"full", "causal", "window"};
constexpr const char* kFeatures[] = {"deterministic", "fp16_out", "gqa", "int8_qk"};
constexpr const char* kPasses[] = {"fwd", "bwd"};

std::string names_of(unsigned features, const char* before, const char* between) {
  std::string names;
  for (size_t i = 0; i < std::size(kFeatures); ++i)
    if (features >> i & 1) names.append(names.empty() ? before : between).append(kFeatures[i]);
  return names;
}

std::string dims_of(int headdim, int headdim_v) {
  return headdim == headdim_v ? text("d%d", headdim) : text("d%dx%d", headdim, headdim_v);
}

// What decides the choice, in the words of the catalog.
struct Traits {
  Pass pass;
  DType dtype;
  Mask mask;
  unsigned features;
  Wanted wanted;
  int headdim, headdim_v, seqlen_k;

  std::string words() const {
    const std::string dims = dims_of(headdim, headdim_v);
    return text("%s.%s.%s.%s", kPasses[int(pass)], kDTypes[int(dtype)], dims.c_str(), kMasks[int(mask)]) +
           names_of(features, ".", ".");
  }
};

// How FP8 codes are made, of tensors of `dtype`.
struct Recipe {
  DType dtype;
  bool hadamard, smooth_k, int8_qk;

  std::string words(const Traits& t) const {
    return text("quantize.%s.%s", kDTypes[int(dtype)], dims_of(t.headdim, t.headdim_v).c_str()) +
           (hadamard ? ".hadamard" : "") + (int8_qk ? ".int8_qk" : "") + (smooth_k ? ".smooth_k" : "");
  }
};

std::string device_word(int capability) { return text("sm_%d", capability); }

const Port* port_on(const Kernel& kernel, int capability) {
  const Port* best = nullptr;
  for (const Port& port : kernel)
    if (port.runs_on(capability) && (best == nullptr || port.capability > best->capability)) best = &port;
  return best;
}

// The first choice with room for the head dimensions, or null where they are too large.
const Choice* first_that_fits(const Port& port, const Traits& t) {
  for (const Choice& c : port)
    if (t.headdim <= c.headdim && t.headdim_v <= c.headdim_v && t.dtype == c.dtype && t.mask == c.mask &&
        (t.features & ~bit(Feature::gqa)) == c.features && t.wanted == c.wanted && t.seqlen_k >= c.min_seqlen)
      return &c;
  return nullptr;
}

std::string widest(const Port& port) {
  int headdim = 0, headdim_v = 0;
  for (const Choice& c : port)
    if (c.headdim + c.headdim_v > headdim + headdim_v) headdim = c.headdim, headdim_v = c.headdim_v;
  return text("at most %d and %d", headdim, headdim_v);
}

std::string needed_archs(const Kernel& kernel) {
  std::string archs;
  for (const Port& port : kernel) archs += (archs.empty() ? "" : ", ") + device_word(port.capability);
  return (kernel.num_ports > 1 ? "needs one of " : "needs ") + archs;
}

// "" where `kernel` runs it, with the choice; else why not, by the order of KernelSpec.refuses.
std::string refusal(const Kernel& kernel, const Traits& t, int capability, const std::string& backend,
                    const Choice*& choice) {
  if (backend != "auto" && backend != kernel.backend) return text("backend \"%s\" was asked for", backend.c_str());
  const Port* port = port_on(kernel, capability);
  if (port == nullptr)
    return text("%s, the device is %s", needed_archs(kernel).c_str(), device_word(capability).c_str());
  if (*kernel.on_request && backend == "auto")
    return text("only with backend \"%s\": %s", kernel.backend, kernel.on_request);
  if (!kernel.has(t.dtype)) return text("no %s", kDTypes[int(t.dtype)]);
  if (!(kernel.masks >> int(t.mask) & 1)) return text("no %s mask", kMasks[int(t.mask)]);
  if (const unsigned missing = t.features & ~kernel.features) return names_of(missing, "no ", ", ");
  const std::string asked = text("headdim %d, headdim_v %d: ", t.headdim, t.headdim_v);
  if (t.headdim % kernel.multiple || t.headdim_v % kernel.multiple)
    return asked + text("both must be multiples of %d", kernel.multiple);
  choice = first_that_fits(*port, t);
  return choice == nullptr ? asked + widest(*port) : "";
}

// Whether a row of its backend takes the dtype, so that this one, for others, has nothing to add.
bool answered(const Kernel& kernel, const Traits& t) {
  for (const Kernel& other : kernels())
    if (other.pass == t.pass && other.has(t.dtype) && std::strcmp(other.backend, kernel.backend) == 0) return true;
  return false;
}

void require_linked(const Variant& variant, const std::string& what) {
  if (variant.function == nullptr)
    throw Error(FAH_NOT_IN_LIBRARY, what +
                                        ", which this library was built without; "
                                        "CMake's FLASHATTN_HOPPER_VARIANTS lists what it is built with");
}

const Choice& choose(const Traits& traits, int capability, const std::string& backend) {
  std::string reasons;
  for (const Kernel& kernel : kernels()) {
    if (kernel.pass != traits.pass || (!kernel.has(traits.dtype) && answered(kernel, traits))) continue;
    const Choice* choice = nullptr;
    const std::string reason = refusal(kernel, traits, capability, backend, choice);
    if (reason.empty()) return *choice;
    reasons += text("\n  %s: %s", kernel.name, reason.c_str());
  }
  throw Error(FAH_UNSUPPORTED, text("no kernel runs %s on %s:%s", traits.words().c_str(),
                                    device_word(capability).c_str(), reasons.c_str()));
}

// The quantizer's own head dimensions are exact: the rotation of another one is another.
const Quantizer& choose_quantizer(const Traits& t, const Recipe& recipe) {
  std::string dims;
  for (const Quantizer& q : quantizers()) {
    if (q.dtype != recipe.dtype || q.hadamard != recipe.hadamard || q.smooth_k != recipe.smooth_k ||
        q.int8_qk != recipe.int8_qk)
      continue;
    if (q.headdim == t.headdim && q.headdim_v == t.headdim_v) return q;
    dims += (dims.empty() ? "" : ", ") + dims_of(q.headdim, q.headdim_v);
  }
  throw Error(FAH_UNSUPPORTED, text("no kernel makes the operands of %s, which would be %s: "
                                    "sm90.quantize is compiled ahead of time for %s",
                                    t.words().c_str(), recipe.words(t).c_str(), dims.c_str()));
}

bool known_backend(const std::string& backend) {
  if (backend == "auto") return true;
  for (const Kernel& kernel : kernels())
    if (backend == kernel.backend) return true;
  return false;
}

Layout contiguous(int64_t batch, int64_t seqlen, int64_t heads, int64_t headdim) {
  return {{batch, seqlen, heads, headdim}, {seqlen * heads * headdim, heads * headdim, headdim, 1}};
}

// A legal stride is a multiple of 16 bytes. That of a dimension of extent 1 means nothing and is replaced.
Layout layout_of(const char* name, const int64_t (&given)[3], int64_t batch, int64_t seqlen, int64_t heads,
                 int64_t headdim) {
  Layout layout = contiguous(batch, seqlen, heads, headdim);
  if (!given[0] && !given[1] && !given[2]) return layout;
  constexpr const char* dims[] = {"batch", "seqlen", "head"};
  for (int i = 2; i >= 0; --i) {
    const bool legal = given[i] >= 0 && given[i] % kAlignment == 0 && given[i] < kMostStride;
    require(legal || layout.shape[i] == 1,
            text("%s_strides: %lld elements from one %s to the next; expected a multiple of %lld from 0 to 2^39", name,
                 static_cast<long long>(given[i]), dims[i], static_cast<long long>(kAlignment)));
    layout.strides[i] = legal ? given[i] : layout.shape[i + 1] * layout.strides[i + 1];
  }
  return layout;
}

void check_extent(const char* name, int32_t value) {
  require(value >= 1, text("%s is %d; expected at least 1", name, value));
}

// Sizes in bytes then fit int64 with room, whatever else an element has beside it.
void check_size(const char* name, int32_t batch, int32_t seqlen, int32_t heads, int32_t headdim) {
  const double count = double(batch) * seqlen * heads * headdim;
  require(count <= double(int64_t{1} << 48),
          text("%s has %g elements, %d x %d x %d x %d; expected at most 2^48", name, count, batch, seqlen, heads, headdim));
}

void check_edge(const char* name, int64_t value) {
  require(value >= FAH_OPEN,
          text("%s is %lld; expected at least 0 keys, or FAH_OPEN", name, static_cast<long long>(value)));
}

void check(const fah_problem& p, int headdim_v) {
  require(p.pass == FAH_FORWARD || p.pass == FAH_BACKWARD,
          text("pass is %d; expected FAH_FORWARD or FAH_BACKWARD", int(p.pass)));
  require(p.dtype == FAH_BF16 || p.dtype == FAH_FP16, text("dtype is %d; expected FAH_BF16 or FAH_FP16", int(p.dtype)));
  check_extent("batch", p.batch);
  check_extent("seqlen_q", p.seqlen_q);
  check_extent("seqlen_k", p.seqlen_k);
  check_extent("num_heads_q", p.num_heads_q);
  check_extent("num_heads_kv", p.num_heads_kv);
  check_extent("headdim", p.headdim);
  check_extent("headdim_v", headdim_v);
  check_size("q", p.batch, p.seqlen_q, p.num_heads_q, p.headdim);
  check_size("k", p.batch, p.seqlen_k, p.num_heads_kv, p.headdim);
  check_size("v", p.batch, p.seqlen_k, p.num_heads_kv, headdim_v);
  require(p.num_heads_q % p.num_heads_kv == 0,
          text("num_heads_q, num_heads_kv: %d is not a multiple of %d", p.num_heads_q, p.num_heads_kv));
  check_edge("window_left", p.window_left);
  check_edge("window_right", p.window_right);
  require(p.softmax_scale == 0 || (p.softmax_scale >= FLT_MIN && p.softmax_scale <= FLT_MAX),
          text("softmax_scale is %g; expected a finite number above 0, or 0 for 1 / sqrt(headdim)",
               double(p.softmax_scale)));
  require(p.device >= FAH_NO_ORDINAL, text("device is %d; expected a CUDA ordinal or FAH_NO_ORDINAL", p.device));
  require(p.precision == FAH_16_BIT || p.precision == FAH_FP8,
          text("precision is %d; expected FAH_16_BIT or FAH_FP8", int(p.precision)));
  require(p.qk_codes >= FAH_DEFAULT_CODES && p.qk_codes <= FAH_E4M3,
          text("qk_codes is %d; expected FAH_DEFAULT_CODES, FAH_INT8 or FAH_E4M3", int(p.qk_codes)));
  require(p.gradients >= FAH_DQ_DK_DV && p.gradients <= FAH_DK_DV,
          text("gradients is %d; expected FAH_DQ_DK_DV, FAH_DQ or FAH_DK_DV", int(p.gradients)));
  if (p.device == FAH_NO_ORDINAL)
    require(p.arch > 0, text("arch is %d; with FAH_NO_ORDINAL expected 10 * major + minor, such as 90", p.arch));
  else
    require(p.arch == 0, text("arch is %d; expected 0, since the device has one", p.arch));
}

Mask mask_of(const fah_problem& p) {
  if (p.window_left != FAH_OPEN) return Mask::window;
  if (p.window_right == FAH_OPEN) return Mask::full;
  return p.window_right == 0 ? Mask::causal : Mask::window;
}

// For int32 arithmetic on the device: an edge further than all keys and queries hides or shows no more.
int64_t edge(int64_t keys, const fah_problem& p) {
  const int64_t far = int64_t{p.seqlen_q} + p.seqlen_k;
  return keys == FAH_OPEN ? far : std::min(keys, far);
}

bool int8_of(const fah_problem& p) {
  return p.qk_codes == FAH_DEFAULT_CODES ? int8_by_default(p.headdim) : p.qk_codes == FAH_INT8;
}

Wanted wanted_of(const fah_problem& p) {
  if (p.pass == FAH_FORWARD || p.gradients == FAH_DQ_DK_DV) return Wanted::all;
  return p.gradients == FAH_DQ ? Wanted::dq : Wanted::dkdv;
}

// Codes, their scales and what the quantizer needs beside, one after the other in the workspace; what must be zero
// comes first. Sizes are those of flashattn_hopper/buffers.py.
void keep_codes(const fah_problem& p, int headdim_v, fah_plan& plan) {
  const int64_t tiles = key_tiles(p.seqlen_k), keys = tiles * tile_keys();
  const int64_t heads = int64_t{p.batch} * p.num_heads_q, heads_kv = int64_t{p.batch} * p.num_heads_kv;
  const int64_t queries = heads * p.seqlen_q, chunks = heads_kv * key_chunks(p.seqlen_k);
  const int64_t word = 4, smooth = plan.quantizer->smooth_k;
  const struct {
    Operand operand;
    int64_t bytes;
  } kept[kNumKept] = {
      {Operand::tickets_, 2 * word},
      {Operand::counters_, heads_kv * word},
      {Operand::q8_, queries * p.headdim},
      {Operand::k8_, heads_kv * p.seqlen_k * p.headdim},
      {Operand::v8_, heads_kv * headdim_v * keys},
      {Operand::q_descale_, queries * word},
      {Operand::k_descale_, heads_kv * tiles * word},
      {Operand::v_descale_, heads_kv * word},
      {Operand::k_mean_, smooth * heads_kv * p.headdim * word},
      {Operand::logit_offset_, smooth * queries * word},
      // A peak of V for each chunk, padded to 16 bytes, and sums of K.
      {Operand::workspace_, ((chunks + 3) / 4 * 4 + chunks * p.headdim) * word},
  };
  Codes& codes = plan.codes;
  size_t end = 0;
  for (int i = 0; i < kNumKept; ++i) {
    codes.places[i] = {kept[i].operand, end};
    end += (size_t(kept[i].bytes) + kKeptAlignment - 1) / kKeptAlignment * kKeptAlignment;
  }
  plan.workspace = {end, kKeptAlignment, codes.places[2].offset};
  codes.int8_qk = plan.quantizer->int8_qk;
  codes.q = contiguous(p.batch, p.seqlen_q, p.num_heads_q, p.headdim);
  codes.k = contiguous(p.batch, p.seqlen_k, p.num_heads_kv, p.headdim);
  codes.v = contiguous(p.batch, p.num_heads_kv, headdim_v, keys);
}

}  // namespace

void make_plan(const fah_problem& given, fah_plan& plan) {
  fah_problem p;
  fah_problem_init(&p);
  require(given.size == sizeof(p),
          text("size is %zu; expected %zu: was the problem made by fah_problem_init?", given.size, sizeof(p)));
  p = given;
  const int headdim_v = p.headdim_v ? p.headdim_v : p.headdim;
  const std::string backend = p.backend == nullptr ? "auto" : p.backend;
  check(p, headdim_v);
  require(known_backend(backend), text("backend \"%s\" is not known", backend.c_str()));

  plan.pass = p.pass == FAH_FORWARD ? Pass::fwd : Pass::bwd;
  plan.dtype = p.dtype == FAH_BF16 ? DType::bf16 : DType::fp16;
  plan.q = layout_of("q", p.q_strides, p.batch, p.seqlen_q, p.num_heads_q, p.headdim);
  plan.k = layout_of("k", p.k_strides, p.batch, p.seqlen_k, p.num_heads_kv, p.headdim);
  plan.v = layout_of("v", p.v_strides, p.batch, p.seqlen_k, p.num_heads_kv, headdim_v);
  plan.dout = layout_of("dout", p.dout_strides, p.batch, p.seqlen_q, p.num_heads_q, headdim_v);
  plan.softmax_scale = p.softmax_scale != 0 ? p.softmax_scale : float(1 / std::sqrt(double(p.headdim)));
  plan.window_left = edge(p.window_left, p);
  plan.window_right = edge(p.window_right, p);

  const DeviceFacts device = p.device == FAH_NO_ORDINAL ? DeviceFacts{p.arch, 0} : device_facts(p.device);
  plan.device = p.device;
  plan.num_sms = device.num_sms;
  const bool fp8 = p.precision == FAH_FP8;
  const Recipe recipe{plan.dtype, p.hadamard != 0, p.smooth_k != 0, int8_of(p)};
  const unsigned features =
      bit(Feature::deterministic, p.deterministic) | bit(Feature::gqa, p.num_heads_q != p.num_heads_kv) |
      bit(Feature::fp16_out, fp8 && plan.dtype == DType::fp16) | bit(Feature::int8_qk, fp8 && recipe.int8_qk);
  const Traits traits{
      plan.pass, fp8 ? DType::fp8 : plan.dtype, mask_of(p), features, wanted_of(p), p.headdim, headdim_v, p.seqlen_k};
  plan.choice = &choose(traits, device.capability, backend);
  plan.quantizer = fp8 ? &choose_quantizer(traits, recipe) : nullptr;
  require_linked(plan.choice->variant,
                 text("%s on %s is %s (%s)", traits.words().c_str(), device_word(device.capability).c_str(),
                      plan.choice->variant.name, plan.choice->tile));
  if (fp8) {
    require_linked(plan.quantizer->variant, text("%s needs %s", traits.words().c_str(), plan.quantizer->variant.name));
    return keep_codes(p, headdim_v, plan);
  }

  const bool tickets = plan.choice->variant.takes(Operand::tickets_);
  const int64_t rows = int64_t{p.batch} * p.num_heads_q * padded_rows(p.seqlen_q);
  const int64_t floats = plan.choice->floats_per_row * rows + plan.choice->floats;
  const size_t ticket_bytes = tickets ? 2 * sizeof(int32_t) : 0;
  plan.workspace = {tickets ? ticket_bytes : static_cast<size_t>(floats) * sizeof(float), 16, ticket_bytes};
}

}  // namespace fah
