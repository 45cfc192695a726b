#include "driver.hpp"

#include <dlfcn.h>

#include <array>
#include <mutex>

#include "error.hpp"

namespace fah {
namespace {

// As in cuda.h, which a host without the toolkit does not have.
using Result = int;
using Device = int;
using Context = void*;
constexpr int kMajor = 75, kMinor = 76, kNumSms = 16;  // CUdevice_attribute

struct Driver {
  Result (*init)(unsigned);
  Result (*count)(int*);
  Result (*get)(Device*, int);
  Result (*attribute)(int*, int, Device);
  Result (*error_text)(Result, const char**);
  Result (*current_device)(Device*);
  Result (*retain_primary)(Context*, Device);
  Result (*push)(Context);
  Result (*pop)(Context*);
};

template <class F>
void find(void* library, F& function, const char* name) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (function == nullptr) throw Error(FAH_NO_DEVICE, text("libcuda.so.1 has no %s: the driver is too old", name));
}

Driver open() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw Error(FAH_NO_DEVICE, text("no CUDA device: there is no driver (%s)", dlerror()));
  Driver d{};
  find(library, d.init, "cuInit");
  find(library, d.count, "cuDeviceGetCount");
  find(library, d.get, "cuDeviceGet");
  find(library, d.attribute, "cuDeviceGetAttribute");
  find(library, d.error_text, "cuGetErrorString");
  find(library, d.current_device, "cuCtxGetDevice");
  find(library, d.retain_primary, "cuDevicePrimaryCtxRetain");
  find(library, d.push, "cuCtxPushCurrent_v2");
  find(library, d.pop, "cuCtxPopCurrent_v2");
  return d;
}

std::string said(const Driver& d, Result result) {
  const char* words = nullptr;
  return text("%s (CUDA error %d)", d.error_text(result, &words) == 0 && words ? words : "no text", result);
}

const Driver& driver() {
  static const Driver d = [] {  // a failure is tried again by the next call
    Driver d = open();
    if (Result result = d.init(0)) throw Error(FAH_NO_DEVICE, "no CUDA device: cuInit: " + said(d, result));
    return d;
  }();
  return d;
}

void check(Result result, const char* what) {
  if (result) throw Error(FAH_CUDA_ERROR, text("%s: %s", what, said(driver(), result).c_str()));
}

constexpr int kMostDevices = 64;

// The primary context, retained until the process ends: what the CUDA runtime of a program keeps anyway.
Context primary(int ordinal) {
  static std::array<Context, kMostDevices> contexts{};
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  Context& context = contexts[static_cast<size_t>(ordinal)];
  if (context == nullptr) {
    Device device;
    check(driver().get(&device, ordinal), "cuDeviceGet");
    check(driver().retain_primary(&context, device), "cuDevicePrimaryCtxRetain");
  }
  return context;
}

}  // namespace

DeviceFacts device_facts(int ordinal) {
  const Driver& d = driver();
  int count = 0;
  check(d.count(&count), "cuDeviceGetCount");
  if (count == 0) throw Error(FAH_NO_DEVICE, "no CUDA device: the driver reports none");
  if (ordinal >= count || ordinal >= kMostDevices)
    throw Error(FAH_NO_DEVICE, text("no CUDA device %d: there are %d", ordinal, count));
  Device device;
  check(d.get(&device, ordinal), "cuDeviceGet");
  int major, minor, num_sms;
  check(d.attribute(&major, kMajor, device), "cuDeviceGetAttribute");
  check(d.attribute(&minor, kMinor, device), "cuDeviceGetAttribute");
  check(d.attribute(&num_sms, kNumSms, device), "cuDeviceGetAttribute");
  return {10 * major + minor, num_sms};
}

CurrentDevice::CurrentDevice(int ordinal) {
  Device current = -1;
  // Device handles of the driver are its ordinals.
  if (driver().current_device(&current) == 0 && current == ordinal) return;
  check(driver().push(primary(ordinal)), "cuCtxPushCurrent");
  pushed_ = true;
}

CurrentDevice::~CurrentDevice() {
  Context popped;
  if (pushed_) driver().pop(&popped);
}

}  // namespace fah
