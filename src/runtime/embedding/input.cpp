#include "runtime/embedding/input.h"

#include <numeric>

#include "base/checked_math.h"
#include "tessera/base/error.h"

namespace tessera::embedding {

std::int64_t sum_of(const std::vector<std::int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
}

Input::Input(const TableSet& tables, std::shared_ptr<const Assignments> assignments,
             std::shared_ptr<dist::Group> group, const OwnBatch& batch)
    : assignments_(std::move(assignments)),
      group_(std::move(group)),
      is_weighted_(tables.options().is_weighted),
      wants_weight_gradients_(batch.wants_weight_gradients),
      failure_(batch.refusal) {
  num_sent_.resize(static_cast<std::size_t>(group_->size()));
}

std::int64_t Input::num_outputs(int rank) const {
  std::int64_t num_outputs = 0;
  for (const Assignment& each : (*assignments_)[static_cast<std::size_t>(rank)]) {
    num_outputs += static_cast<std::int64_t>(each.outputs.size());
  }
  return num_outputs;
}

std::int64_t Input::payload(int rank, std::int64_t batch_size, std::int64_t num_ids) const {
  return num_outputs(rank) * batch_size + num_ids +
         (is_weighted_ ? ceil_div<std::int64_t>(num_ids, 2) : 0);
}

std::vector<std::int64_t> Input::send_sizes() const {
  std::vector<std::int64_t> sizes;
  for (std::size_t peer = 0; peer < num_sent_.size(); ++peer) {
    sizes.push_back(payload(static_cast<int>(peer), batch_.batch_size, num_sent_[peer]));
  }
  return sizes;
}

std::vector<std::int64_t> Input::receive_sizes() const {
  std::vector<std::int64_t> sizes;
  for (std::size_t peer = 0; peer < batch_sizes_.size(); ++peer) {
    sizes.push_back(payload(rank(), batch_sizes_[peer], num_received_[peer]));
  }
  return sizes;
}

void Input::write_header(std::int64_t* header, std::uint64_t fingerprint) const {
  header[kBatchSize] = failure_ ? kRefused : batch_.batch_size;
  header[kFingerprint] = static_cast<std::int64_t>(fingerprint);
  header[kWantsWeightGradients] = static_cast<std::int64_t>(wants_weight_gradients_);
}

void Input::check_headers(const std::int64_t* headers, std::size_t stride) {
  const std::size_t num_ranks = num_sent_.size();
  const std::int64_t* const own = headers + static_cast<std::size_t>(rank()) * stride;
  for (std::size_t peer = 0; peer < num_ranks; ++peer) {
    const std::int64_t* const of_peer = headers + peer * stride;
    if (of_peer[kFingerprint] != own[kFingerprint]) {
      throw Error::expected(ErrorKind::mismatch, {}, "embedding collection",
                            "the same tables, plan, kernels and optimizer on every rank",
                            "different ones on rank " + std::to_string(peer));
    }
    if (of_peer[kBatchSize] == kRefused) {
      throw Error::expected(ErrorKind::invalid_argument, {}, "batch of an embedding collection",
                            "a valid batch on every rank",
                            "an invalid batch on rank " + std::to_string(peer),
                            "the error of that rank says what is wrong");
    }
    batch_sizes_.push_back(of_peer[kBatchSize]);
    returns_weight_gradients_ |= of_peer[kWantsWeightGradients] != 0;
  }
}

}  // namespace tessera::embedding
