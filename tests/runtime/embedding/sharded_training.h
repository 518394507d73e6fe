#pragma once

#include <torch/torch.h>

#include <string>
#include <vector>

#include "runtime/embedding/tables.h"
#include "tessera/runtime/dist/mesh.h"
#include "tessera/runtime/registry/state_dict.h"

// Trains the small tables unsharded and sharded, and compares.

namespace tessera::test {

/// The results of training, for the batch of all ranks or of one rank. Tensors are on the CPU.
struct Trained {
  std::vector<at::Tensor> outputs;           // by step
  std::vector<at::Tensor> weight_gradients;  // of the batch's weights, by step
  StateDict state;
  StateDict optimizer_state;
};

/// A way to train.
struct Way {
  TableOptions options;
  embedding::FusedOptimizer optimizer;

  std::string name() const;
};

/// Sum and mean, weighted and not, with every optimizer.
std::vector<Way> all_ways();

/// Trains whole tables on the CPU with the batches of all ranks.
Trained train_alone(int world_size, const Way& way);
/// Trains on this rank's samples. `batch_device`: where batches are when they are looked up.
Trained train_sharded(const dist::Mesh& mesh, const PlanKind& kind, const Way& way,
                      const ShardOptions& options = {}, at::Device batch_device = at::kCPU);

void expect_close(const at::Tensor& found, const at::Tensor& expected, const std::string& what);
void expect_close(const StateDict& found, const StateDict& expected, const std::string& what);
/// Expects that a rank's results are its part of the results of training alone.
void expect_shards_of(const Trained& alone, const Trained& sharded, const Way& way,
                      const dist::Mesh& mesh);

}  // namespace tessera::test
