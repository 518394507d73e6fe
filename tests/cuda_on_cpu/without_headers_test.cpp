#include <gtest/gtest.h>

TEST(CudaOnCpuTest, KernelsAgreeWithTheProcessors) {
  GTEST_SKIP() << "no headers of the CUDA toolkit, or not an x86-64 processor";
}
