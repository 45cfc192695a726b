// The C interface: no exception leaves it, and each failure leaves its text in this thread.
#include <memory>
#include <new>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "error.hpp"
#include "flashattn_hopper.h"
#include "launch.hpp"
#include "plan.hpp"

namespace {

thread_local std::string last_error;

template <class Work>
fah_status guarded(Work work) noexcept {
  try {
    work();
    return FAH_OK;
  } catch (fah::Error& error) {
    last_error = std::move(error.message);
    return error.status;
  } catch (const std::bad_alloc&) {
    last_error = "out of memory";  // short enough to need none
    return FAH_OUT_OF_MEMORY;
  } catch (const std::exception&) {
    last_error = "internal error";
    return FAH_INTERNAL_ERROR;
  }
}

void not_null(const void* pointer, const char* name) {
  if (pointer == nullptr) throw fah::Error(FAH_INVALID_ARGUMENT, fah::text("%s is NULL", name));
}

// Each once: several tiles, and deterministic calls, may share a name.
const std::vector<const char*>& library_variants() {
  static const std::vector<const char*> names = [] {
    std::vector<const char*> found;
    std::set<std::string> seen;
    const auto add = [&](const fah::Variant& variant) {
      if (variant.function != nullptr && seen.insert(variant.name).second) found.push_back(variant.name);
    };
    for (const fah::Kernel& kernel : fah::kernels())
      for (const fah::Port& port : kernel)
        for (const fah::Choice& choice : port) add(choice.variant);
    for (const fah::Quantizer& quantizer : fah::quantizers()) add(quantizer.variant);
    return found;
  }();
  return names;
}

}  // namespace

extern "C" {

void fah_problem_init(fah_problem* problem) {
  if (problem == nullptr) return;
  *problem = {};
  problem->size = sizeof(*problem);
  problem->pass = FAH_FORWARD;
  problem->dtype = FAH_BF16;
  problem->window_left = problem->window_right = FAH_OPEN;
  problem->backend = "auto";
  problem->precision = FAH_16_BIT;
  problem->qk_codes = FAH_DEFAULT_CODES;
  problem->hadamard = problem->smooth_k = 1;
  problem->gradients = FAH_DQ_DK_DV;
}

fah_status fah_plan_create(const fah_problem* problem, fah_plan** plan) {
  if (plan != nullptr) *plan = nullptr;
  return guarded([&] {
    not_null(problem, "problem");
    not_null(plan, "plan");
    auto made = std::make_unique<fah_plan>();
    fah::make_plan(*problem, *made);
    *plan = made.release();
  });
}

void fah_plan_destroy(fah_plan* plan) { delete plan; }

fah_status fah_plan_workspace(const fah_plan* plan, fah_workspace* workspace) {
  return guarded([&] {
    not_null(plan, "plan");
    not_null(workspace, "workspace");
    *workspace = plan->workspace;
  });
}

const char* fah_plan_variant(const fah_plan* plan) { return plan == nullptr ? nullptr : plan->choice->variant.name; }

const char* fah_plan_quantizer(const fah_plan* plan) {
  return plan == nullptr || plan->quantizer == nullptr ? nullptr : plan->quantizer->variant.name;
}

const char* fah_plan_tile(const fah_plan* plan) { return plan == nullptr ? nullptr : plan->choice->tile; }

fah_status fah_forward(const fah_plan* plan, const fah_forward_args* args, void* stream) {
  return guarded([&] {
    not_null(plan, "plan");
    not_null(args, "args");
    fah::Call(*plan, *args).run(stream);
  });
}

fah_status fah_backward(const fah_plan* plan, const fah_backward_args* args, void* stream) {
  return guarded([&] {
    not_null(plan, "plan");
    not_null(args, "args");
    fah::Call(*plan, *args).run(stream);
  });
}

const char* fah_last_error(void) { return last_error.c_str(); }

const char* fah_status_name(fah_status status) {
  switch (status) {
    case FAH_OK:
      return "FAH_OK";
    case FAH_INVALID_ARGUMENT:
      return "FAH_INVALID_ARGUMENT";
    case FAH_UNSUPPORTED:
      return "FAH_UNSUPPORTED";
    case FAH_NOT_IN_LIBRARY:
      return "FAH_NOT_IN_LIBRARY";
    case FAH_NO_DEVICE:
      return "FAH_NO_DEVICE";
    case FAH_CUDA_ERROR:
      return "FAH_CUDA_ERROR";
    case FAH_INTERNAL_ERROR:
      return "FAH_INTERNAL_ERROR";
    case FAH_OUT_OF_MEMORY:
      return "FAH_OUT_OF_MEMORY";
  }
  return "unknown status";
}

const char* fah_version(void) { return FAH_VERSION; }

const char* fah_library_variant(size_t index) {
  const std::vector<const char*>& names = library_variants();
  return index < names.size() ? names[index] : nullptr;
}

}  // extern "C"
