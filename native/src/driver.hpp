// The few functions of the CUDA driver that are needed, from libcuda.so.1 when it is first asked for. Why not linked:
// the library must load, plan and explain itself on a machine without a driver.
#pragma once

namespace fah {

struct DeviceFacts {
  int capability;  // 10 * major + minor
  int num_sms;
};

// Raises Error FAH_NO_DEVICE where there is no such device.
DeviceFacts device_facts(int ordinal);

// Makes the device's primary context current in this thread, if none of that device is, until it is destroyed.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  bool pushed_ = false;
};

}  // namespace fah
