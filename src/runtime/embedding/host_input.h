#pragma once

#include <memory>
#include <vector>

#include "runtime/embedding/input.h"
#include "runtime/embedding/outgoing_batch.h"

namespace tessera::embedding {

/// Sends a batch to ranks whose tables are on the CPU.
class HostInput final : public Input {
 public:
  /// Starts the first message (sizes, see Input), and prepares the second message, so that the
  /// caller may change the batch afterwards. If this rank's batch is invalid, `advance` throws on
  /// all ranks. `fingerprint`: must be equal on all ranks. Collective.
  HostInput(const TableSet& tables, std::shared_ptr<const Assignments> assignments,
            std::shared_ptr<dist::Group> group, const OwnBatch& batch, std::uint64_t fingerprint);

  void advance() override;
  const LocalBags& bags() override;
  void return_weight_gradients(const at::Tensor& from, at::Tensor to) override;
  const at::Tensor& lengths() override { return batch_.lengths; }

 private:
  void send();
  /// The bags that one rank sent for one output.
  struct Run {
    const std::int64_t* lengths;
    std::int64_t num_samples;
    const std::int64_t* ids = nullptr;
    const float* weights = nullptr;
    std::int64_t* offsets = nullptr;  // gets the end of each bag of the run
    std::int64_t begin = 0;           // index of the run's first id in the ids of all runs
    std::int64_t num_ids = 0;
  };
  void unpack();
  std::vector<const std::int64_t*> received_messages() const;
  std::vector<Run> received_runs() const;
  void allocate_bags();
  void place_runs(std::vector<Run>& runs);

  std::vector<Outgoing> outgoing_;
  // A header ends with the numbers of ids that its rank sends to each rank.
  at::Tensor headers_;  // [ranks, 3 + ranks]
  at::Tensor header_;
  at::Tensor sent_, received_;
  dist::Pending pending_;
  // Positions in the batch of the ids sent to each rank.
  std::vector<std::vector<std::int64_t>> positions_;
  bool has_advanced_ = false;
  bool has_arrived_ = false;
};

}  // namespace tessera::embedding
