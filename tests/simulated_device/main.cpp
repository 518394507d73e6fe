#include <ATen/Parallel.h>
#include <gmock/gmock.h>

#include <cstdlib>

#include "simulated_device/device.h"

// For ThreadSanitizer, beside tests/runtime/tsan-suppressions.txt. A thread of autograd's engine
// wakes the thread that began a backward, whose queue is destroyed at that thread's end. Libtorch
// counts who uses the queue by atomics that the sanitizer does not see. Here alone, because it
// would hide a race for the end of a condition variable of our own: the device's streams never end,
// and the one of formats/native is tested without this by unit_tests and runtime_tests.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions() {
  return "race_top:pthread_cond_destroy\n";
}

int main(int argc, char** argv) {
  testing::InitGoogleMock(&argc, argv);
  at::set_num_threads(1);
  tessera::sim::register_device(/*num_devices=*/4);
  const int result = RUN_ALL_TESTS();
  std::fflush(nullptr);
  std::_Exit(result);  // the threads of streams do not end
}
