#include "runtime/embedding/input_exchange.h"

#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "tessera/base/checked_math.h"
#include "tessera/base/error.h"

namespace tessera::embedding {
namespace {

const std::int64_t* longs(const at::Tensor& tensor) {
  return tensor.const_data_ptr<std::int64_t>();
}

/// Calls `visit` with each id of a slice that lies in a shard's rows, with its sample and position.
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

}  // namespace

Input::Input(const TableSet& tables, std::shared_ptr<const Assignments> assignments,
             std::shared_ptr<dist::Group> group, const KeyedJaggedTensor& batch,
             Positions positions)
    : assignments_(std::move(assignments)),
      group_(std::move(group)),
      is_weighted_(tables.options().is_weighted),
      keeps_positions_(positions) {
  const int num_ranks = group_->size();
  num_sent_.resize(static_cast<std::size_t>(num_ranks));
  positions_.resize(static_cast<std::size_t>(num_ranks));
  header_ = torch::zeros({1 + num_ranks}, at::kLong);
  auto* const header = header_.mutable_data_ptr<std::int64_t>();
  try {
    batch_ = batch_for(tables, batch);
    for (int rank = 0; rank < num_ranks; ++rank) count(rank);
    header[0] = batch_.batch_size;
    std::ranges::copy(num_sent_, header + 1);
  } catch (const Error&) {
    refusal_ = std::current_exception();
    header[0] = -1;
  }
  headers_ = torch::empty({num_ranks * (1 + num_ranks)}, at::kLong);
  pending_ = group_->all_gather(headers_, header_, "sizes of batches");
}

std::int64_t Input::num_outputs(int rank) const {
  std::int64_t num_outputs = 0;
  for (const Assignment& each : (*assignments_)[static_cast<std::size_t>(rank)]) {
    num_outputs += static_cast<std::int64_t>(each.outputs.size());
  }
  return num_outputs;
}

/// Returns the length of what is sent to a rank by one with such a batch. Units: int64.
std::int64_t Input::payload(int rank, std::int64_t batch_size, std::int64_t num_ids) const {
  return num_outputs(rank) * batch_size + num_ids +
         (is_weighted_ ? ceil_div<std::int64_t>(num_ids, 2) : 0);
}

void Input::count(int rank) {
  const auto to = static_cast<std::size_t>(rank);
  for (const Assignment& each : (*assignments_)[to]) {
    for (const std::size_t output : each.outputs) {
      num_sent_[to] += num_ids_in(batch_, batch_.slices[output], each.rows);
    }
  }
}

void Input::pack(int rank, std::int64_t* lengths, std::int64_t* ids, float* weights) {
  const auto to = static_cast<std::size_t>(rank);
  if (keeps_positions_ == Positions::keep) {
    positions_[to].reserve(static_cast<std::size_t>(num_sent_[to]));
  }
  const float* const from =
      is_weighted_ && batch_.weights.defined() ? batch_.weights.const_data_ptr<float>() : nullptr;
  for (const Assignment& each : (*assignments_)[to]) {
    for (const std::size_t output : each.outputs) {
      std::fill_n(lengths, batch_.batch_size, 0);
      for_each_id(batch_, batch_.slices[output], each.rows,
                  [&](std::int64_t sample, std::int64_t position, std::int64_t row) {
                    ++lengths[sample];
                    *ids++ = row;
                    if (from != nullptr) *weights++ = from[position];
                    if (keeps_positions_ == Positions::keep) positions_[to].push_back(position);
                  });
      lengths += batch_.batch_size;
    }
  }
}

void Input::advance() {
  if (std::exchange(has_advanced_, true)) return;
  pending_.wait();
  const auto num_ranks = static_cast<std::size_t>(group_->size());
  const std::int64_t* const headers = longs(headers_);
  if (refusal_) std::rethrow_exception(refusal_);
  std::vector<std::int64_t> send_sizes, receive_sizes;
  for (std::size_t peer = 0; peer < num_ranks; ++peer) {
    const std::int64_t* const of_peer = headers + peer * (1 + num_ranks);
    if (of_peer[0] < 0) {
      throw Error::expected(ErrorKind::invalid_argument, {}, "batch of an embedding collection",
                            "a sound one on every rank",
                            "one that rank " + std::to_string(peer) + " refused");
    }
    batch_sizes_.push_back(of_peer[0]);
    num_received_.push_back(of_peer[1 + static_cast<std::size_t>(rank())]);
    receive_sizes.push_back(payload(rank(), batch_sizes_.back(), num_received_.back()));
    send_sizes.push_back(payload(static_cast<int>(peer), batch_.batch_size, num_sent_[peer]));
  }
  const auto total = [](const std::vector<std::int64_t>& sizes) {
    return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  };
  sent_ = torch::empty({total(send_sizes)}, at::kLong);
  auto* to = sent_.mutable_data_ptr<std::int64_t>();
  for (std::size_t peer = 0; peer < num_ranks; ++peer) {
    std::int64_t* const ids = to + num_outputs(static_cast<int>(peer)) * batch_.batch_size;
    pack(static_cast<int>(peer), to, ids, reinterpret_cast<float*>(ids + num_sent_[peer]));
    to += send_sizes[peer];
  }
  if (num_ranks == 1) {
    received_ = sent_;
    return;
  }
  received_ = torch::empty({total(receive_sizes)}, at::kLong);
  pending_ = group_->all_to_all(received_, receive_sizes, sent_, send_sizes, "ids of batches");
}

const LocalBags& Input::bags() {
  if (std::exchange(has_arrived_, true)) return bags_;
  advance();
  pending_.wait();
  unpack();
  sent_ = received_ = at::Tensor();
  return bags_;
}

/// Puts the bags of all ranks together, output by output.
void Input::unpack() {
  const std::int64_t outputs = num_outputs(rank());
  const auto num_ranks = batch_sizes_.size();
  const auto sum = [](const std::vector<std::int64_t>& each) {
    return std::accumulate(each.begin(), each.end(), std::int64_t{0});
  };
  bags_.num_samples = sum(batch_sizes_);
  const std::int64_t num_ids = sum(num_received_);
  bags_.ids = torch::empty({num_ids}, at::kLong);
  bags_.offsets = torch::empty({outputs * bags_.num_samples + 1}, at::kLong);
  if (is_weighted_) bags_.weights = torch::empty({num_ids}, at::kFloat);
  struct Source {
    const std::int64_t* lengths;
    const std::int64_t* ids;
    const float* weights;
  };
  std::vector<Source> sources;
  const std::int64_t* at = longs(received_);
  for (std::size_t peer = 0; peer < num_ranks; ++peer) {
    const std::int64_t* const ids = at + outputs * batch_sizes_[peer];
    sources.push_back({at, ids, reinterpret_cast<const float*>(ids + num_received_[peer])});
    at += payload(rank(), batch_sizes_[peer], num_received_[peer]);
  }
  auto* const ids = bags_.ids.mutable_data_ptr<std::int64_t>();
  auto* const weights = is_weighted_ ? bags_.weights.mutable_data_ptr<float>() : nullptr;
  auto* offset = bags_.offsets.mutable_data_ptr<std::int64_t>();
  std::int64_t end = 0;
  *offset++ = 0;
  for (std::int64_t output = 0; output < outputs; ++output) {
    for (std::size_t peer = 0; peer < num_ranks; ++peer) {
      Source& source = sources[peer];
      const std::int64_t begin = end;
      for (std::int64_t sample = 0; sample < batch_sizes_[peer]; ++sample) {
        *offset++ = end += source.lengths[sample];
      }
      const auto num_here = static_cast<std::size_t>(end - begin);
      if (num_here > 0) {
        std::memcpy(ids + begin, source.ids, num_here * sizeof(std::int64_t));
        if (weights != nullptr) {
          std::memcpy(weights + begin, source.weights, num_here * sizeof(float));
        }
      }
      source.lengths += batch_sizes_[peer];
      source.ids += num_here;
      source.weights += num_here;
    }
  }
}

void Input::return_weight_gradients(const at::Tensor& from, at::Tensor to) {
  TESSERA_CHECK(keeps_positions_ == Positions::keep && has_arrived_);
  const auto num_ranks = batch_sizes_.size();
  const std::int64_t outputs = num_outputs(rank());
  at::Tensor sorted = torch::empty_like(from);  // by rank, as the ids came
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
    returned = torch::empty({std::accumulate(num_sent_.begin(), num_sent_.end(), std::int64_t{0})},
                            at::kFloat);
    group_->all_to_all(returned, num_sent_, sorted, num_received_, "gradients of sample weights")
        .wait();
  }
  const float* gradient = returned.const_data_ptr<float>();
  auto* const result = to.mutable_data_ptr<float>();
  for (const std::vector<std::int64_t>& positions : positions_) {
    for (const std::int64_t position : positions) result[position] += *gradient++;
  }
}

}  // namespace tessera::embedding
