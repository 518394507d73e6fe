#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#define TESSERA_NEEDS_CUDA() \
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU"
