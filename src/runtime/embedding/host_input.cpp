#include "runtime/embedding/host_input.h"

#include <torch/types.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "runtime/embedding/host_loops.h"
#include "tessera/base/error.h"

namespace tessera::embedding {
HostInput::HostInput(const TableSet& tables, std::shared_ptr<const Assignments> assignments,
                     std::shared_ptr<dist::Group> group, const OwnBatch& batch,
                     std::uint64_t fingerprint)
    : Input(tables, std::move(assignments), std::move(group), batch) {
  positions_.resize(num_sent_.size());
  try {
    if (!failure_) {
      batch_ = batch_for(tables, *batch.batch, at::kCPU);
      outgoing_ = outgoing_of(batch_, *assignments_);
      count_ids(batch_, outgoing_);
      sum_up(outgoing_, num_sent_);
      const std::vector<std::int64_t> sizes = send_sizes();
      sent_ = torch::empty({sum_of(sizes)}, at::kLong);
      pack(batch_, outgoing_, sizes, num_sent_, sent_,
           wants_weight_gradients_ ? &positions_ : nullptr);
    }
  } catch (...) {
    failure_ = std::current_exception();
  }
  header_ = torch::zeros({static_cast<std::int64_t>(kNumFields + num_sent_.size())}, at::kLong);
  auto* const header = header_.mutable_data_ptr<std::int64_t>();
  write_header(header, fingerprint);
  std::ranges::copy(num_sent_, header + kNumFields);
  headers_ = torch::empty({header_.numel() * group_->size()}, at::kLong);
  pending_ = group_->all_gather(headers_, header_, "sizes of batches");
}

void HostInput::advance() {
  if (has_advanced_) return;
  try {
    pending_.wait();
    if (failure_) std::rethrow_exception(failure_);
    const std::size_t num_ranks = num_sent_.size();
    const std::size_t stride = kNumFields + num_ranks;
    check_headers(longs(headers_), stride);
    for (std::size_t peer = 0; peer < num_ranks; ++peer) {
      num_received_.push_back(
          longs(headers_)[peer * stride + kNumFields + static_cast<std::size_t>(rank())]);
    }
    send();
    has_advanced_ = true;
  } catch (...) {
    failure_ = std::current_exception();
    throw;
  }
}

/// Starts the second message.
void HostInput::send() {
  if (num_sent_.size() == 1) {
    received_ = sent_;
    return;
  }
  const std::vector<std::int64_t> sizes = receive_sizes();
  received_ = torch::empty({sum_of(sizes)}, at::kLong);
  pending_ = group_->all_to_all(received_, sizes, sent_, send_sizes(), "ids of batches");
}

const LocalBags& HostInput::bags() {
  if (has_arrived_) return bags_;
  advance();
  try {
    pending_.wait();
    unpack();
    has_arrived_ = true;
  } catch (...) {
    failure_ = std::current_exception();
    throw;
  }
  sent_ = received_ = at::Tensor();
  return bags_;
}

/// Returns the beginning of each rank's message in `received_`.
std::vector<const std::int64_t*> HostInput::received_messages() const {
  std::vector<const std::int64_t*> messages;
  const std::int64_t* at = longs(received_);
  for (const std::int64_t size : receive_sizes()) {
    messages.push_back(at);
    at += size;
  }
  return messages;
}

/// Returns the runs, ordered by output and then by rank. Sets only their `lengths`, `num_samples`
/// and `num_ids`.
std::vector<HostInput::Run> HostInput::received_runs() const {
  const std::int64_t outputs = num_outputs(rank());
  const std::vector<const std::int64_t*> messages = received_messages();
  std::vector<Run> runs;
  for (std::int64_t output = 0; output < outputs; ++output) {
    for (std::size_t peer = 0; peer < messages.size(); ++peer) {
      runs.push_back({messages[peer] + output * batch_sizes_[peer], batch_sizes_[peer]});
    }
  }
  for_all(runs, [](Run& run) {
    run.num_ids = std::accumulate(run.lengths, run.lengths + run.num_samples, std::int64_t{0});
  });
  return runs;
}

/// Allocates the tensors of the bags. If there is one rank, the received ids are already in the
/// right order. Then the bags' ids and weights are views of the message.
void HostInput::allocate_bags() {
  const std::int64_t outputs = num_outputs(rank());
  const std::int64_t num_ids = sum_of(num_received_);
  bags_.num_samples = sum_of(batch_sizes_);
  bags_.offsets = torch::empty({outputs * bags_.num_samples + 1}, at::kLong);
  if (batch_sizes_.size() == 1) {
    const at::Tensor behind_lengths = received_.slice(0, outputs * bags_.num_samples);
    bags_.ids = behind_lengths.narrow(0, 0, num_ids);
    if (is_weighted_) {
      bags_.weights = behind_lengths.slice(0, num_ids).view(at::kFloat).narrow(0, 0, num_ids);
    }
  } else {
    bags_.ids = torch::empty({num_ids}, at::kLong);
    if (is_weighted_) bags_.weights = torch::empty({num_ids}, at::kFloat);
  }
}

/// Sets for each run the pointers to its ids and weights in the message, and to its place in the
/// bags.
void HostInput::place_runs(std::vector<Run>& runs) {
  struct Source {  // pointers to the next ids and weights of a rank's message
    const std::int64_t* ids;
    const float* weights;
  };
  const std::int64_t outputs = num_outputs(rank());
  const std::vector<const std::int64_t*> messages = received_messages();
  std::vector<Source> sources;
  for (std::size_t peer = 0; peer < messages.size(); ++peer) {
    const std::int64_t* const ids = messages[peer] + outputs * batch_sizes_[peer];
    sources.push_back({ids, reinterpret_cast<const float*>(ids + num_received_[peer])});
  }
  auto* offset = bags_.offsets.mutable_data_ptr<std::int64_t>();
  *offset++ = 0;
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    Run& run = runs[i];
    Source& source = sources[i % sources.size()];
    run.ids = std::exchange(source.ids, source.ids + run.num_ids);
    run.weights = std::exchange(source.weights, source.weights + run.num_ids);
    run.offsets = std::exchange(offset, offset + run.num_samples);
    run.begin = std::exchange(begin, begin + run.num_ids);
  }
  // True unless lengths and ids come from different batches.
  TESSERA_CHECK(begin == sum_of(num_received_));
}

/// Assembles the bags from the received messages, in order of output and then of rank.
void HostInput::unpack() {
  std::vector<Run> runs = received_runs();
  allocate_bags();
  place_runs(runs);
  const bool is_in_order = batch_sizes_.size() == 1;
  auto* const ids = bags_.ids.mutable_data_ptr<std::int64_t>();
  auto* const weights = is_weighted_ ? bags_.weights.mutable_data_ptr<float>() : nullptr;
  for_all(runs, [&](const Run& run) {
    std::int64_t end = run.begin;
    for (std::int64_t sample = 0; sample < run.num_samples; ++sample) {
      run.offsets[sample] = end += run.lengths[sample];
    }
    if (is_in_order) return;
    std::copy_n(run.ids, run.num_ids, ids + run.begin);
    if (weights != nullptr) std::copy_n(run.weights, run.num_ids, weights + run.begin);
  });
}

void HostInput::return_weight_gradients(const at::Tensor& from, at::Tensor to) {
  TESSERA_CHECK(returns_weight_gradients_ && has_arrived_);
  const auto num_ranks = batch_sizes_.size();
  const std::int64_t outputs = num_outputs(rank());
  // Gradients by rank, in the order of the received ids.
  at::Tensor sorted = torch::empty_like(from);
  const float* source = from.const_data_ptr<float>();
  std::vector<float*> places;
  auto* place = sorted.mutable_data_ptr<float>();
  for (const std::int64_t num_ids : num_received_) {
    places.push_back(place);
    place += num_ids;
  }
  const std::int64_t* offset = longs(bags_.offsets);
  for (std::int64_t output = 0; output < outputs; ++output) {
    for (std::size_t peer = 0; peer < num_ranks; ++peer) {
      const std::int64_t num_here = offset[batch_sizes_[peer]] - offset[0];
      places[peer] = std::copy_n(source, num_here, places[peer]);
      source += num_here;
      offset += batch_sizes_[peer];
    }
  }
  at::Tensor returned = sorted;
  if (num_ranks > 1) {
    returned = torch::empty({sum_of(num_sent_)}, at::kFloat);
    group_->all_to_all(returned, num_sent_, sorted, num_received_, "gradients of sample weights")
        .wait();
  }
  if (!to.defined()) return;
  const float* gradient = returned.const_data_ptr<float>();
  auto* const result = to.mutable_data_ptr<float>();
  for (const std::vector<std::int64_t>& positions : positions_) {
    for (const std::int64_t position : positions) result[position] += *gradient++;
  }
}

}  // namespace tessera::embedding
