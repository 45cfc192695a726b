// From a plan and addresses to the host half of a kernel.
#pragma once

#include <array>

#include "plan.hpp"

namespace fah {

// One launch: everything it passes, in its caller's frame. A kernel keeps nothing of it.
class Call {
 public:
  // Raise Error where an address is missing or not aligned, or the plan is for the other pass.
  Call(const fah_plan& plan, const fah_forward_args& args);
  Call(const fah_plan& plan, const fah_backward_args& args);
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // On the plan's device and that stream. Raises Error.
  void run(void* stream);

  // Enter the kernels' host halves, or one of them, which check what they are passed, on whatever device and stream is
  // current.
  void enter();
  void enter(const Variant& variant);

 private:
  Call(const fah_plan& plan, Pass pass);
  void tensor(Operand which, DLTensor& memory, const Layout& layout, const char* name, const void* pointer);
  void described(Operand which, DLTensor& memory, DLDataType dtype, const Layout& layout, const void* pointer);
  void kept(const void* workspace);  // what lies there of the codes
  void address(Operand which, const char* name, const void* pointer, size_t alignment);
  void gradient(Operand which, const char* name, const void* pointer, bool computed);  // 0 where it is not
  void wanted(Operand which, const char* name, const float* pointer);                  // 0 for NULL
  TVMFFIAny& operand(Operand which) { return values_[size_t(which)]; }

  const fah_plan& plan_;
  DLTensor q_, k_, v_, dout_, q_codes_, k_codes_, v_codes_;
  std::array<TVMFFIAny, size_t(Operand::count)> values_{};  // all zero bytes: None
};

}  // namespace fah
