#include "launch.hpp"

#include <tvm/ffi/extra/c_env_api.h>

#include <mutex>
#include <string>

#include "driver.hpp"
#include "error.hpp"

namespace fah {
namespace {

TVMFFIAny any(int32_t type) {
  TVMFFIAny value{};
  value.type_index = type;
  return value;
}

TVMFFIAny integer(int64_t number) {
  TVMFFIAny value = any(kTVMFFIInt);
  value.v_int64 = number;
  return value;
}

TVMFFIAny real(double number) {
  TVMFFIAny value = any(kTVMFFIFloat);
  value.v_float64 = number;
  return value;
}

// Why not `require` here: it takes a text that is made, and making those of one launch costs microseconds.
void check_address(const char* name, const void* pointer, size_t alignment) {
  if (pointer == nullptr) throw Error(FAH_INVALID_ARGUMENT, text("%s is NULL", name));
  if (reinterpret_cast<uintptr_t>(pointer) % alignment)
    throw Error(FAH_INVALID_ARGUMENT, text("%s: its address is not a multiple of %zu bytes", name, alignment));
}

// The stream that kernels ask for, in this thread, until it is destroyed.
class CurrentStream {
 public:
  CurrentStream(int device, void* stream) : device_(device) {
    if (TVMFFIEnvSetStream(kDLCUDA, device, stream, &before_)) throw Error(FAH_CUDA_ERROR, "the stream cannot be set");
  }
  ~CurrentStream() { TVMFFIEnvSetStream(kDLCUDA, device_, before_, nullptr); }
  CurrentStream(const CurrentStream&) = delete;
  CurrentStream& operator=(const CurrentStream&) = delete;

 private:
  int device_;
  TVMFFIStreamHandle before_ = nullptr;
};

// The text of the error that a kernel's host half left in this thread.
std::string raised() {
  TVMFFIObjectHandle error = nullptr;
  TVMFFIErrorMoveFromRaised(&error);
  if (error == nullptr) return "failed without a message";
  const TVMFFIErrorCell* cell = TVMFFIErrorGetCellPtr(error);
  std::string words(cell->kind.data, cell->kind.size);
  words.append(": ").append(cell->message.data, cell->message.size);
  TVMFFIObjectDecRef(error);
  return words;
}

// What the host half takes: one sequence of operands, as tvm_ffi lays out an array, without an allocation.
struct Sequence {
  TVMFFIObject object;
  TVMFFISeqCell cell;
};
constexpr uint64_t kHeld = (uint64_t{1} << 32) | 1;  // weak and strong owners: us, so that nobody else frees it

}  // namespace

Call::Call(const fah_plan& plan, Pass pass) : plan_(plan) {
  if (plan.pass != pass)
    throw Error(FAH_INVALID_ARGUMENT,
                text("the plan is for the %s pass", plan.pass == Pass::fwd ? "forward" : "backward"));
  operand(Operand::softmax_scale_) = real(plan.softmax_scale);
  operand(Operand::window_left_) = integer(plan.window_left);
  operand(Operand::window_right_) = integer(plan.window_right);
  operand(Operand::num_ctas_) = integer(plan.num_sms);
}

Call::Call(const fah_plan& plan, const fah_forward_args& args) : Call(plan, Pass::fwd) {
  tensor(Operand::q_, q_, plan.q, "q", args.q);
  tensor(Operand::k_, k_, plan.k, "k", args.k);
  tensor(Operand::v_, v_, plan.v, "v", args.v);
  address(Operand::o_, "out", args.out, 16);
  wanted(Operand::lse_, "lse", args.lse);
  if (plan.workspace.bytes) address(Operand::tickets_, "workspace", args.workspace, plan.workspace.alignment);
  if (plan.quantizer) kept(args.workspace);
}

Call::Call(const fah_plan& plan, const fah_backward_args& args) : Call(plan, Pass::bwd) {
  tensor(Operand::q_, q_, plan.q, "q", args.q);
  tensor(Operand::k_, k_, plan.k, "k", args.k);
  tensor(Operand::v_, v_, plan.v, "v", args.v);
  tensor(Operand::do_, dout_, plan.dout, "dout", args.dout);
  address(Operand::o_, "out", args.out, 16);
  address(Operand::lse_, "lse", args.lse, sizeof(float));
  wanted(Operand::dlse_, "dlse", args.dlse);
  gradient(Operand::dq_, "dq", args.dq, plan.choice->wanted != Wanted::dkdv);
  gradient(Operand::dk_, "dk", args.dk, plan.choice->wanted != Wanted::dq);
  gradient(Operand::dv_, "dv", args.dv, plan.choice->wanted != Wanted::dq);
  address(Operand::workspace_, "workspace", args.workspace, plan.workspace.alignment);
}

void Call::tensor(Operand which, DLTensor& memory, const Layout& layout, const char* name, const void* pointer) {
  check_address(name, pointer, 16);
  described(which, memory, {uint8_t(plan_.dtype == DType::bf16 ? kDLBfloat : kDLFloat), 16, 1}, layout, pointer);
}

void Call::described(Operand which, DLTensor& memory, DLDataType dtype, const Layout& layout, const void* pointer) {
  memory.data = const_cast<void*>(pointer);
  memory.device = {kDLCUDA, plan_.device};
  memory.ndim = 4;
  memory.dtype = dtype;
  memory.shape = const_cast<int64_t*>(layout.shape);
  memory.strides = const_cast<int64_t*>(layout.strides);
  memory.byte_offset = 0;
  operand(which) = any(kTVMFFIDLTensorPtr);
  operand(which).v_ptr = &memory;
}

void Call::kept(const void* workspace) {
  // The kernel could also write the lse of the scores that the codes give, which lack the mean of K.
  operand(Operand::restored_lse_) = operand(Operand::lse_);
  operand(Operand::lse_) = integer(0);
  const Codes& codes = plan_.codes;
  for (const Codes::Place& place : codes.places)
    operand(place.operand) = integer(reinterpret_cast<intptr_t>(workspace) + intptr_t(place.offset));
  const DLDataType e4m3{kDLFloat8_e4m3fn, 8, 1}, qk = codes.int8_qk ? DLDataType{kDLInt, 8, 1} : e4m3;
  const auto at = [&](Operand which) { return reinterpret_cast<const void*>(operand(which).v_int64); };
  described(Operand::q_codes_, q_codes_, qk, codes.q, at(Operand::q8_));
  described(Operand::k_codes_, k_codes_, qk, codes.k, at(Operand::k8_));
  described(Operand::v_codes_, v_codes_, e4m3, codes.v, at(Operand::v8_));
  if (!plan_.quantizer->smooth_k) operand(Operand::logit_offset_) = integer(0);
}

void Call::address(Operand which, const char* name, const void* pointer, size_t alignment) {
  check_address(name, pointer, alignment);
  operand(which) = integer(reinterpret_cast<intptr_t>(pointer));
}

void Call::gradient(Operand which, const char* name, const void* pointer, bool computed) {
  if (computed)
    address(which, name, pointer, 16);
  else
    operand(which) = integer(0);
}

void Call::wanted(Operand which, const char* name, const float* pointer) {
  if (pointer == nullptr)
    operand(which) = integer(0);
  else
    address(which, name, pointer, sizeof(float));
}

void Call::run(void* stream) {
  if (plan_.device == FAH_NO_ORDINAL)
    throw Error(FAH_INVALID_ARGUMENT, "the plan was made without a device (FAH_NO_ORDINAL): it cannot be launched");
  CurrentDevice device(plan_.device);
  CurrentStream current(plan_.device, stream);
  if (plan_.loaded.load(std::memory_order_acquire)) return enter();
  // Why: a first launch loads the code, which concerns all threads.
  static std::mutex loading;
  std::lock_guard<std::mutex> lock(loading);
  enter();
  plan_.loaded.store(true, std::memory_order_release);
}

void Call::enter() {
  if (plan_.quantizer) enter(plan_.quantizer->variant);
  enter(plan_.choice->variant);
}

void Call::enter(const Variant& variant) {
  TVMFFIAny items[kMostOperands];
  for (int i = 0; i < variant.num_operands; ++i) items[i] = operand(variant.operands[i]);
  Sequence sequence{};
  sequence.object.combined_ref_count = kHeld;
  sequence.object.type_index = kTVMFFIArray;
  sequence.cell = {items, variant.num_operands, variant.num_operands, nullptr};
  TVMFFIAny argument = any(kTVMFFIArray), result = any(kTVMFFINone);
  argument.v_obj = &sequence.object;
  if (variant.function(nullptr, &argument, 1, &result))
    throw Error(FAH_CUDA_ERROR, text("%s: %s", variant.name, raised().c_str()));
}

}  // namespace fah
