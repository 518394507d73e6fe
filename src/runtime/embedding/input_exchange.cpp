#include "runtime/embedding/input_exchange.h"

#include <ATen/Parallel.h>
#include <torch/types.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/checked_math.h"
#include "tessera/base/error.h"
#include "tessera/base/parallel.h"

namespace tessera::embedding {
namespace {

// Indices of the fields in the header of a rank's batch. After these fields, the header has the
// number of ids that the rank sends to each rank.
constexpr std::size_t kBatchSize = 0;  // kRefused: the rank has no batch
constexpr std::size_t kFingerprint = 1;
constexpr std::size_t kWantsWeightGradients = 2;
constexpr std::size_t kNumFields = 3;
constexpr std::int64_t kRefused = -1;

const std::int64_t* longs(const at::Tensor& tensor) {
  return tensor.const_data_ptr<std::int64_t>();
}

/// Calls `visit(sample, position, row)` for each id of `slice` that is in `rows`. `position`: index
/// into the batch's ids. `row`: the id minus `rows.begin`.
template <class Visit>
void for_each_id(const TableBatch& batch, const TableBatch::Slice& slice, FlatRange rows,
                 const Visit& visit) {
  const std::int64_t* const ids = longs(batch.ids);
  std::int64_t position = slice.begin;
  for (std::int64_t sample = 0; sample < batch.batch_size; ++sample) {
    const std::int64_t end = position + batch.length(slice, sample);
    for (; position < end; ++position) {
      const std::int64_t id = ids[position];
      if (id >= rows.begin && id < rows.end) visit(sample, position, id - rows.begin);
    }
  }
}

std::int64_t num_ids_in(const TableBatch& batch, const TableBatch::Slice& slice, FlatRange rows) {
  const std::int64_t* const ids = longs(batch.ids);
  std::int64_t num_ids = 0;
  for (std::int64_t i = slice.begin; i < slice.end; ++i) {
    num_ids += static_cast<std::int64_t>(ids[i] >= rows.begin && ids[i] < rows.end);
  }
  return num_ids;
}

/// Calls `body(each)` for all elements of a vector, in parallel.
template <class T, class Body>
void for_all(std::vector<T>& vector, const Body& body) {
  parallel_for(static_cast<std::int64_t>(vector.size()), at::get_num_threads(), {},
               [&](std::int64_t i) { body(vector[static_cast<std::size_t>(i)]); });
}

}  // namespace

std::int64_t sum_of(const std::vector<std::int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
}

Input::Input(const TableSet& tables, std::shared_ptr<const Assignments> assignments,
             std::shared_ptr<dist::Group> group, const OwnBatch& batch, std::uint64_t fingerprint)
    : assignments_(std::move(assignments)),
      group_(std::move(group)),
      is_weighted_(tables.options().is_weighted),
      wants_weight_gradients_(batch.wants_weight_gradients),
      failure_(batch.refusal) {
  const auto num_ranks = static_cast<std::size_t>(group_->size());
  num_sent_.resize(num_ranks);
  positions_.resize(num_ranks);
  try {
    if (!failure_) {
      batch_ = batch_for(tables, *batch.batch);
      count_ids();
      pack();
    }
  } catch (...) {
    failure_ = std::current_exception();
  }
  header_ = torch::zeros({static_cast<std::int64_t>(kNumFields + num_ranks)}, at::kLong);
  auto* const header = header_.mutable_data_ptr<std::int64_t>();
  header[kBatchSize] = failure_ ? kRefused : batch_.batch_size;
  header[kFingerprint] = static_cast<std::int64_t>(fingerprint);
  header[kWantsWeightGradients] = static_cast<std::int64_t>(wants_weight_gradients_);
  std::ranges::copy(num_sent_, header + kNumFields);
  headers_ = torch::empty({header_.numel() * group_->size()}, at::kLong);
  pending_ = group_->all_gather(headers_, header_, "sizes of batches");
}

std::int64_t Input::num_outputs(int rank) const {
  std::int64_t num_outputs = 0;
  for (const Assignment& each : (*assignments_)[static_cast<std::size_t>(rank)]) {
    num_outputs += static_cast<std::int64_t>(each.outputs.size());
  }
  return num_outputs;
}

/// Returns the size of the second message to `rank` from a rank that has `batch_size` samples and
/// sends `num_ids` ids. Units: int64.
std::int64_t Input::payload(int rank, std::int64_t batch_size, std::int64_t num_ids) const {
  return num_outputs(rank) * batch_size + num_ids +
         (is_weighted_ ? ceil_div<std::int64_t>(num_ids, 2) : 0);
}

void Input::count_ids() {
  for (int rank = 0; rank < group_->size(); ++rank) {
    for (const Assignment& each : (*assignments_)[static_cast<std::size_t>(rank)]) {
      for (const std::size_t output : each.outputs) {
        outgoing_.push_back({&each, batch_.slices[output], rank});
      }
    }
  }
  for_all(outgoing_, [&](Outgoing& outgoing) {
    outgoing.num_ids = outgoing.assignment->has_all_rows
                           ? outgoing.slice.end - outgoing.slice.begin
                           : num_ids_in(batch_, outgoing.slice, outgoing.assignment->rows);
  });
  for (Outgoing& outgoing : outgoing_) {
    std::int64_t& num_sent = num_sent_[static_cast<std::size_t>(outgoing.rank)];
    outgoing.begin = std::exchange(num_sent, num_sent + outgoing.num_ids);
  }
}

/// Writes the second messages of this rank, one for each rank.
void Input::pack() {
  struct Place {
    const Outgoing* outgoing;
    std::int64_t* lengths;
    std::int64_t* ids;
    float* weights;
    std::int64_t* positions;
  };
  std::vector<Place> places;
  const std::vector<std::int64_t> sizes = send_sizes();
  sent_ = torch::empty({sum_of(sizes)}, at::kLong);
  auto* message = sent_.mutable_data_ptr<std::int64_t>();
  auto outgoing = outgoing_.begin();
  for (int rank = 0; rank < group_->size(); ++rank) {
    const auto to = static_cast<std::size_t>(rank);
    if (wants_weight_gradients_) {
      positions_[to].resize(static_cast<std::size_t>(num_sent_[to]));
    }
    std::int64_t* lengths = message;
    std::int64_t* const ids = message + num_outputs(rank) * batch_.batch_size;
    auto* const weights = reinterpret_cast<float*>(ids + num_sent_[to]);
    for (; outgoing != outgoing_.end() && outgoing->rank == rank;
         ++outgoing, lengths += batch_.batch_size) {
      places.push_back({&*outgoing, lengths, ids + outgoing->begin, weights + outgoing->begin,
                        positions_[to].data() + outgoing->begin});
    }
    message += sizes[to];
  }
  for_all(places, [&](const Place& place) {
    pack(*place.outgoing, place.lengths, place.ids, place.weights, place.positions);
  });
}

void Input::pack(const Outgoing& outgoing, std::int64_t* lengths, std::int64_t* ids, float* weights,
                 std::int64_t* positions) const {
  const TableBatch::Slice& slice = outgoing.slice;
  const float* const from =
      is_weighted_ && batch_.weights.defined() ? batch_.weights.const_data_ptr<float>() : nullptr;
  if (slice.is_missing) {
    std::fill_n(lengths, batch_.batch_size, 0);
  } else if (outgoing.assignment->has_all_rows) {
    std::copy_n(longs(batch_.lengths) + slice.first_bag, batch_.batch_size, lengths);
    std::copy_n(longs(batch_.ids) + slice.begin, outgoing.num_ids, ids);
    if (from != nullptr) std::copy_n(from + slice.begin, outgoing.num_ids, weights);
    if (wants_weight_gradients_) std::iota(positions, positions + outgoing.num_ids, slice.begin);
  } else {
    std::fill_n(lengths, batch_.batch_size, 0);
    for_each_id(batch_, slice, outgoing.assignment->rows,
                [&](std::int64_t sample, std::int64_t position, std::int64_t row) {
                  ++lengths[sample];
                  *ids++ = row;
                  if (from != nullptr) *weights++ = from[position];
                  if (wants_weight_gradients_) *positions++ = position;
                });
  }
}

std::vector<std::int64_t> Input::send_sizes() const {
  std::vector<std::int64_t> sizes;
  for (std::size_t peer = 0; peer < num_sent_.size(); ++peer) {
    sizes.push_back(payload(static_cast<int>(peer), batch_.batch_size, num_sent_[peer]));
  }
  return sizes;
}

void Input::advance() {
  if (has_advanced_) return;
  try {
    pending_.wait();
    if (failure_) std::rethrow_exception(failure_);
    check_headers();
    send();
    has_advanced_ = true;
  } catch (...) {
    failure_ = std::current_exception();
    throw;
  }
}

/// Reads the headers of all ranks, which the first message brought. Throws if a rank refused its
/// batch or has another fingerprint.
void Input::check_headers() {
  const std::size_t num_ranks = num_sent_.size();
  const std::int64_t* const headers = longs(headers_);
  const std::size_t stride = kNumFields + num_ranks;
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
    num_received_.push_back(of_peer[kNumFields + static_cast<std::size_t>(rank())]);
    returns_weight_gradients_ |= of_peer[kWantsWeightGradients] != 0;
  }
}

/// Starts the second message.
void Input::send() {
  if (num_sent_.size() == 1) {
    received_ = sent_;
    return;
  }
  std::vector<std::int64_t> receive_sizes;
  for (std::size_t peer = 0; peer < batch_sizes_.size(); ++peer) {
    receive_sizes.push_back(payload(rank(), batch_sizes_[peer], num_received_[peer]));
  }
  received_ = torch::empty({sum_of(receive_sizes)}, at::kLong);
  pending_ = group_->all_to_all(received_, receive_sizes, sent_, send_sizes(), "ids of batches");
}

const LocalBags& Input::bags() {
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

/// Returns for each rank where its message begins in `received_`.
std::vector<const std::int64_t*> Input::received_messages() const {
  std::vector<const std::int64_t*> messages;
  const std::int64_t* at = longs(received_);
  for (std::size_t peer = 0; peer < batch_sizes_.size(); ++peer) {
    messages.push_back(at);
    at += payload(rank(), batch_sizes_[peer], num_received_[peer]);
  }
  return messages;
}

/// Returns the runs, ordered by output, then by rank. Sets only `lengths`, `num_samples`,
/// `num_ids`.
std::vector<Input::Run> Input::received_runs() const {
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

/// Allocates the bags. If there is one rank, the received ids are already in the bags' order, so
/// the bags' ids and weights are views of the message.
void Input::allocate_bags() {
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

/// Sets for each run where its ids and weights are in the message, and where its bags are to be
/// put.
void Input::place_runs(std::vector<Run>& runs) {
  struct Source {  // the next ids and weights of a rank
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
  // This fails if lengths and ids are from different batches.
  TESSERA_CHECK(begin == sum_of(num_received_));
}

/// Assembles the bags of all ranks, output by output.
void Input::unpack() {
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

void Input::return_weight_gradients(const at::Tensor& from, at::Tensor to) {
  TESSERA_CHECK(returns_weight_gradients_ && has_arrived_);
  const auto num_ranks = batch_sizes_.size();
  const std::int64_t outputs = num_outputs(rank());
  at::Tensor sorted = torch::empty_like(from);  // ordered by rank, then as the ids came
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
