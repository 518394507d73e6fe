#include <ATen/Parallel.h>
#include <gmock/gmock.h>

#include <cstdlib>

#include "simulated_device/device.h"

int main(int argc, char** argv) {
  testing::InitGoogleMock(&argc, argv);
  at::set_num_threads(1);
  tessera::sim::register_device(/*num_devices=*/4);
  const int result = RUN_ALL_TESTS();
  std::fflush(nullptr);
  std::_Exit(result);  // the threads of streams do not end
}
