// Trains one step, sharded: what a trainer does that uses Tessera as a library.
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <cstdio>

#include "tessera/tessera.h"

int main() {
  const auto mesh = tessera::dist::init_from_env();
  torch::nn::Linear model(4, 3);
  tessera::fully_shard(*model, {.mesh = mesh});
  torch::optim::SGD optimizer(tessera::parameters(*model), 0.1);
  tessera::forward(model, torch::ones({2, 4})).sum().backward();
  optimizer.step();
  std::printf("stepped on %d rank\n", mesh.world_size());
}
