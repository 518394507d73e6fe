#include "runtime/embedding/device_input.h"

#include <c10/core/StreamGuard.h>
#include <torch/types.h>

#include <algorithm>

#include "runtime/embedding/host_loops.h"
#include "runtime/embedding/table_kernels.h"
#include "runtime/torch_bridge.h"
#include "tessera/base/error.h"

namespace tessera::embedding {
namespace {

using at::Tensor;

}  // namespace

DeviceInput::DeviceInput(const TableSet& tables, std::shared_ptr<const Assignments> assignments,
                         std::shared_ptr<dist::Group> group, const OwnBatch& batch,
                         std::uint64_t fingerprint, std::shared_ptr<SideStream> stream,
                         HostIds host_ids)
    : Input(tables, std::move(assignments), std::move(group), batch),
      stream_(std::move(stream)),
      device_(stream_->device()),
      host_ids_(host_ids) {
  for (int each = 0; each < group_->size(); ++each) {
    if (each == rank()) own_pairs_begin_ = num_pairs_;
    num_pairs_ += num_outputs(each);
  }
  const at::NoGradGuard no_grad;
  try {
    if (!failure_) take_batch(tables, *batch.batch);
  } catch (...) {
    failure_ = std::current_exception();
    packing_.reset();
  }
  start_headers(fingerprint);
}

void DeviceInput::take_batch(const TableSet& tables, const KeyedJaggedTensor& batch) {
  batch_ = batch_for(tables, batch, device_);
  outgoing_ = outgoing_of(batch_, *assignments_);
  if (batch_.is_on_host()) {
    count_ids(batch_, outgoing_);
    const c10::StreamGuard guard(stream_->stream());
    pack_on_host();
    lengths_ = stream_->to_device(batch_.lengths);
  } else {
    own_batch_.emplace(OwnBatchOnDevice{tables, batch});
    stream_->wait_for_current();
    // Tells the allocator that this stream reads the batch. Otherwise the allocator could reuse the
    // memory too early, when the caller has freed the batch.
    const c10::StreamGuard guard(stream_->stream());
    for (const Tensor& tensor : {batch_.ids, batch_.lengths, batch_.offsets, batch_.weights}) {
      stream_->note_use(tensor);
    }
    packing_.emplace(batch_, outgoing_);
    lengths_ = batch_.lengths;
  }
}

void DeviceInput::pack_on_host() {
  sum_up(outgoing_, num_sent_);
  const std::vector<std::int64_t> sizes = send_sizes();
  Tensor message = pinned({sum_of(sizes)}, at::kLong);
  std::vector<std::vector<std::int64_t>> positions(num_sent_.size());
  pack(batch_, outgoing_, sizes, num_sent_, message,
       wants_weight_gradients_ ? &positions : nullptr);
  sent_ = stream_->to_device(message);
  if (!wants_weight_gradients_) return;
  Tensor all = pinned({sum_of(num_sent_)}, at::kLong);
  auto* to = all.mutable_data_ptr<std::int64_t>();
  for (const std::vector<std::int64_t>& each : positions) to = std::ranges::copy(each, to).out;
  positions_ = stream_->to_device(all);
}

/// Starts the first message.
void DeviceInput::start_headers(std::uint64_t fingerprint) {
  Tensor own = pinned({static_cast<std::int64_t>(kNumFields) + num_pairs_}, at::kLong);
  own.zero_();
  auto* const header = own.mutable_data_ptr<std::int64_t>();
  write_header(header, fingerprint);
  if (!failure_) {
    for (std::size_t i = 0; i < outgoing_.size(); ++i) {
      const TableBatch::Slice& slice = outgoing_[i].slice;
      header[kNumFields + i] = packing_ ? slice.end - slice.begin : outgoing_[i].num_ids;
    }
  }
  if (group_->size() == 1 && !packing_) {
    headers_ = own;
    return;
  }
  const c10::StreamGuard guard(stream_->stream());
  Tensor on_device = stream_->to_device(own);
  if (packing_) {
    if (packing_->num_ids().defined()) {
      on_device.narrow(0, static_cast<std::int64_t>(kNumFields), num_pairs_)
          .copy_(packing_->num_ids());
    }
    Tensor batch_size = on_device.select(0, static_cast<std::int64_t>(kBatchSize));
    batch_size.copy_(torch::where(has_bad_ids(own_batch_->tables, batch_), kRefused, batch_size));
  }
  headers_ = torch::empty({on_device.numel() * group_->size()}, on_device.options());
  pending_ = group_->all_gather(headers_, on_device, "sizes of batches");
}

/// Returns the headers of all ranks in host memory. The host waits for the first message.
Tensor DeviceInput::received_headers() {
  if (headers_.is_cpu()) return headers_;
  pending_.wait();
  Tensor on_host = pinned(headers_.sizes(), at::kLong);
  on_host.copy_(headers_, /*non_blocking=*/true);
  stream_->record().synchronize();
  return on_host;
}

void DeviceInput::advance() {
  if (has_advanced_) return;
  const at::NoGradGuard no_grad;
  const c10::StreamGuard guard(stream_->stream());
  try {
    const Tensor headers = received_headers();
    if (failure_) std::rethrow_exception(failure_);
    take_headers(longs(headers));
    send();
    has_advanced_ = true;
  } catch (...) {
    failure_ = std::current_exception();
    throw;
  }
}

void DeviceInput::take_headers(const std::int64_t* headers) {
  const std::size_t stride = kNumFields + static_cast<std::size_t>(num_pairs_);
  const std::int64_t* const own = headers + static_cast<std::size_t>(rank()) * stride;
  if (packing_) refuse_bad_ids(own);
  check_headers(headers, stride);
  const auto outputs = static_cast<std::size_t>(num_outputs(rank()));
  for (int peer = 0; peer < group_->size(); ++peer) {
    const std::int64_t* const first =
        headers + static_cast<std::size_t>(peer) * stride + kNumFields + own_pairs_begin_;
    num_ids_of_output_.emplace_back(first, first + outputs);
    num_received_.push_back(sum_of(num_ids_of_output_.back()));
  }
  if (!packing_) return;
  for (std::size_t i = 0; i < outgoing_.size(); ++i) outgoing_[i].num_ids = own[kNumFields + i];
  sum_up(outgoing_, num_sent_);
}

/// Throws if this rank's batch, which is on the device, has an id out of range.
void DeviceInput::refuse_bad_ids(const std::int64_t* own_header) {
  if (own_header[kBatchSize] != kRefused) return;
  batch_for(own_batch_->tables, own_batch_->batch.to(at::kCPU), device_);  // throws, naming the id
  TESSERA_CHECK(false);
}

/// Starts the second message, and queues the work that assembles the bags from it.
void DeviceInput::send() {
  if (packing_) {
    sent_ = packing_->message(group_->size());
    if (wants_weight_gradients_) positions_ = packing_->positions();
    packing_.reset();
    own_batch_.reset();
  }
  const std::vector<std::int64_t> sizes = receive_sizes();
  if (group_->size() == 1) {
    received_ = sent_;
  } else {
    received_ = torch::empty({sum_of(sizes)}, sent_.options());
    group_->all_to_all(received_, sizes, sent_, send_sizes(), "ids of batches").wait();
  }
  unpack(sizes);
  if (host_ids_ == HostIds::copied) {
    bags_.host_ids = pinned(bags_.ids.sizes(), at::kLong);
    bags_.host_ids.copy_(bags_.ids, /*non_blocking=*/true);
  }
  sent_ = received_ = headers_ = Tensor();
  arrived_.emplace(stream_->record());
}

template <class Visit>
void DeviceInput::for_received(const Visit& visit) const {
  std::vector<std::int64_t> begins(batch_sizes_.size());
  for (std::int64_t output = 0; output < num_outputs(rank()); ++output) {
    for (std::size_t peer = 0; peer < batch_sizes_.size(); ++peer) {
      const std::int64_t num_ids = num_ids_of_output_[peer][static_cast<std::size_t>(output)];
      visit(output, peer, begins[peer], num_ids);
      begins[peer] += num_ids;
    }
  }
}

/// Assembles the bags from the received messages, in order of output and then of rank.
void DeviceInput::unpack(const std::vector<std::int64_t>& sizes) {
  const std::int64_t outputs = num_outputs(rank());
  bags_.num_samples = sum_of(batch_sizes_);
  std::vector<Tensor> lengths, ids, weights;
  std::vector<Tensor> of_peer;
  std::int64_t begin = 0;
  for (const std::int64_t size : sizes) {
    of_peer.push_back(received_.narrow(0, begin, size));
    begin += size;
  }
  bags_.output_begins = {0};
  std::int64_t num_ids_so_far = 0;
  for_received(
      [&](std::int64_t output, std::size_t peer, std::int64_t first, std::int64_t num_ids) {
        const Tensor& message = of_peer[peer];
        const std::int64_t batch_size = batch_sizes_[peer];
        lengths.push_back(message.narrow(0, output * batch_size, batch_size));
        ids.push_back(message.narrow(0, outputs * batch_size + first, num_ids));
        num_ids_so_far += num_ids;
        if (peer + 1 == batch_sizes_.size()) bags_.output_begins.push_back(num_ids_so_far);
        if (!is_weighted_ || num_ids == 0) return;
        weights.push_back(message.slice(0, outputs * batch_size + num_received_[peer])
                              .view(at::kFloat)
                              .narrow(0, first, num_ids));
      });
  const auto options = received_.options();
  const Tensor zero = torch::zeros({1}, options);
  bags_.offsets = zero;
  if (!lengths.empty()) {
    // A statement of its own: if it throws inside a braced list in `?:`, AddressSanitizer of g++ 12
    // reports an error that does not exist.
    const Tensor ends = torch::cat(lengths).cumsum(0);
    bags_.offsets = torch::cat({zero, ends});
  }
  bags_.ids = ids.empty() ? torch::empty({0}, options) : torch::cat(ids);
  if (!is_weighted_) return;
  bags_.weights =
      weights.empty() ? torch::empty({0}, options.dtype(at::kFloat)) : torch::cat(weights);
}

const LocalBags& DeviceInput::bags() {
  advance();
  if (host_ids_ == HostIds::copied) arrived_->synchronize();
  stream_->let_current_wait(*arrived_);
  for (const Tensor& tensor : {bags_.ids, bags_.offsets, bags_.weights, lengths_, positions_}) {
    stream_->note_use(tensor);
  }
  return bags_;
}

const Tensor& DeviceInput::lengths() {
  TESSERA_CHECK(has_advanced_);
  return lengths_;
}

void DeviceInput::return_weight_gradients(const Tensor& from, Tensor to) {
  TESSERA_CHECK(returns_weight_gradients_ && has_advanced_);
  std::vector<std::vector<Tensor>> by_peer(batch_sizes_.size());
  std::int64_t begin = 0;
  for_received(
      [&](std::int64_t /*output*/, std::size_t peer, std::int64_t /*first*/, std::int64_t num_ids) {
        by_peer[peer].push_back(from.narrow(0, begin, num_ids));
        begin += num_ids;
      });
  std::vector<Tensor> sorted;  // gradients by rank, in the order of the received ids
  for (const std::vector<Tensor>& each : by_peer) {
    sorted.insert(sorted.end(), each.begin(), each.end());
  }
  Tensor returned = sorted.empty() ? torch::empty({0}, from.options()) : torch::cat(sorted);
  if (group_->size() > 1) {
    const Tensor sent = returned;
    returned = torch::empty({sum_of(num_sent_)}, from.options());
    group_->all_to_all(returned, num_sent_, sent, num_received_, "gradients of sample weights")
        .wait();
  }
  if (to.defined() && positions_.numel() > 0) add_rows(to, positions_, returned);
}

}  // namespace tessera::embedding
