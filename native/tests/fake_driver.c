/* A libcuda.so.1 that a test controls: FAKE_DEVICES of compute capability 9.0 with 132 multiprocessors, or FAKE_INIT,
 * an error. FAKE_CURRENT is the device whose context is current, if any. It counts contexts that were pushed and
 * popped. */
#include <stdlib.h>

static int number(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text ? atoi(text) : otherwise;
}

int fake_pushed = 0, fake_popped = 0, fake_retained = 0;

int cuInit(unsigned flags) { return (void)flags, number("FAKE_INIT", 0); }

int cuDeviceGetCount(int* count) { return *count = number("FAKE_DEVICES", 1), 0; }

int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 132 : -1;
  return 0;
}

int cuGetErrorString(int error, const char** text) { return *text = error == 100 ? "no device at all" : "other", 0; }

int cuCtxGetDevice(int* device) {
  *device = number("FAKE_CURRENT", -1);
  return *device < 0 ? 201 : 0;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = &fake_retained + device;
  return ++fake_retained, 0;
}

int cuCtxPushCurrent_v2(void* context) { return (void)context, ++fake_pushed, 0; }

int cuCtxPopCurrent_v2(void** context) { return *context = NULL, ++fake_popped, 0; }
