#include <ATen/Parallel.h>
#include <gmock/gmock.h>

#include <cstdlib>

#include "simulated_device/device.h"

// A suppression for ThreadSanitizer, in addition to tests/runtime/tsan-suppressions.txt. It hides a
// false report: a thread of autograd's engine wakes the thread that began a backward, through a
// queue that is destroyed when that thread ends. Libtorch counts the users of the queue with
// atomics that the sanitizer does not see. The suppression is only in this program, because it
// would also hide a race between the use and the destruction of Tessera's own condition variables.
// The simulated device destroys none, because its streams never end. Those of saves (src/formats)
// are also tested without the suppression, by unit_tests and runtime_tests.
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
