#include "tessera/runtime/dist/group.h"

#include <torch/types.h>
#include <cmath>
#include <limits>
#include <mutex>
#include <numeric>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "runtime/dist/message.h"
#include "runtime/torch_bridge.h"
#include "tessera/base/error.h"

namespace tessera::dist {
namespace {

// Returns a mutex to hold while a collective is started. The process has one c10d flight recorder,
// which records started collectives without a lock (seen in torch 2.11). Several threads start
// collectives if ranks are threads, or if a save runs in the background.
std::mutex& starting_mutex() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace

void Pending::wait() {
  if (!work_) return;
  const auto work = std::exchange(work_, nullptr);
  try {
    work->wait();
  } catch (const std::exception& error) {
    throw Error(ErrorKind::io, {}, what_ + ": " + message_of(error));
  }
}

Group::Group(std::string name, at::Device device) : name_(std::move(name)), device_(device) {}

Group::Group(std::string name, c10::intrusive_ptr<c10d::Store> store, Connect connect,
             at::Device device)
    : name_(std::move(name)),
      store_(std::move(store)),
      connect_(std::move(connect)),
      backend_(connect_(store_)),
      device_(device),
      rank_(backend_->getRank()),
      size_(backend_->getSize()) {}

std::shared_ptr<Group> Group::separate(const std::string& purpose) {
  const std::string name = name_ + ", " + purpose;
  if (!backend_) return std::make_shared<Group>(name, device_);
  auto store =
      c10::make_intrusive<c10d::PrefixStore>("separate/" + std::to_string(next_number()), store_);
  auto group = std::make_shared<Group>(name, std::move(store), connect_, device_);
  group->counters_ = counters_;
  return group;
}

template <class Begin>
Pending Group::start(const char* collective, const std::string& what, Begin&& begin) const {
  const std::string name = "rank " + std::to_string(rank_) + " of " + std::to_string(size_) + " (" +
                           name_ + "): " + collective + " of " + what;
  const std::lock_guard lock(starting_mutex());
  try {
    return {begin(), name};
  } catch (const std::exception& error) {
    // Gloo cannot start to send to a rank whose connection is known to be closed.
    throw Error(ErrorKind::io, {}, name + ": " + message_of(error));
  }
}

Pending Group::all_gather(at::Tensor output, at::Tensor input, const std::string& what) {
  TESSERA_CHECK(output.numel() == input.numel() * size_ && output.is_contiguous());
  const at::NoGradGuard no_grad;
  if (!backend_) {
    output.copy_(input);
    return {};
  }
  counters_->all_gather += output.nbytes();
  return start("all-gather", what, [&] { return backend_->_allgather_base(output, input); });
}

Pending Group::reduce_scatter(at::Tensor output, at::Tensor input, const std::string& what) {
  TESSERA_CHECK(input.numel() == output.numel() * size_ && input.is_contiguous());
  const at::NoGradGuard no_grad;
  if (!backend_) {
    output.copy_(input);
    return {};
  }
  counters_->reduce_scatter += input.nbytes();
  return start("reduce-scatter", what,
               [&] { return backend_->_reduce_scatter_base(output, input); });
}

Pending Group::all_reduce(at::Tensor tensor, const std::string& what) {
  if (!backend_) return {};
  counters_->all_reduce += tensor.nbytes();
  std::vector<at::Tensor> tensors = {std::move(tensor)};
  return start("all-reduce", what, [&] { return backend_->allreduce(tensors); });
}

Pending Group::broadcast(at::Tensor tensor, int root, const std::string& what) {
  if (!backend_) return {};
  counters_->broadcast += tensor.nbytes();
  std::vector<at::Tensor> tensors = {std::move(tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  return start("broadcast", what, [&] { return backend_->broadcast(tensors, options); });
}

Pending Group::all_to_all(at::Tensor received, std::vector<std::int64_t> num_received,
                          at::Tensor sent, std::vector<std::int64_t> num_sent,
                          const std::string& what) {
  const auto is_cut_by = [&](const at::Tensor& tensor, const std::vector<std::int64_t>& sizes) {
    return tensor.dim() == 1 && tensor.is_contiguous() &&
           sizes.size() == static_cast<std::size_t>(size_) &&
           tensor.numel() == std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  };
  TESSERA_CHECK(is_cut_by(received, num_received) && is_cut_by(sent, num_sent));
  const at::NoGradGuard no_grad;
  if (!backend_) {
    received.copy_(sent);
    return {};
  }
  counters_->all_to_all += sent.nbytes();
  return start("all-to-all", what,
               [&] { return backend_->alltoall_base(received, sent, num_received, num_sent); });
}

void Group::scatter(at::Tensor output, const at::Tensor& input, int root, const std::string& what) {
  const at::NoGradGuard no_grad;
  TESSERA_CHECK(rank_ != root || input.numel() == output.numel() * size_);
  const auto split_of = [&](int rank) {
    return input.narrow(0, rank * output.numel(), output.numel());
  };
  std::vector<Pending> pending;
  if (rank_ == root) {
    output.copy_(split_of(rank_));
    for (int rank = 0; rank < size_; ++rank) {
      if (rank != root) pending.push_back(start_sending(split_of(rank), rank, what));
    }
  } else {
    receive(output, root, what);
  }
  for (Pending& each : pending) each.wait();
}

Pending Group::start_sending(at::Tensor tensor, int to, const std::string& what) {
  TESSERA_CHECK(to != rank_ && tensor.is_contiguous());
  counters_->sent += tensor.nbytes();
  std::vector<at::Tensor> tensors = {std::move(tensor)};
  return start("sending", what, [&] { return backend_->send(tensors, to, /*tag=*/0); });
}

void Group::send(at::Tensor tensor, int to, const std::string& what) {
  start_sending(std::move(tensor), to, what).wait();
}

void Group::receive(at::Tensor tensor, int from, const std::string& what) {
  TESSERA_CHECK(from != rank_ && tensor.is_contiguous());
  std::vector<at::Tensor> tensors = {std::move(tensor)};
  start("receiving", what, [&] { return backend_->recv(tensors, from, /*tag=*/0); }).wait();
}

double Group::max(double value, const std::string& what) {
  if (!backend_) return value;
  // Backends do not agree about the maximum of a NaN and a number. So a second number says whether
  // the value is NaN.
  const bool is_nan = std::isnan(value);
  std::vector<at::Tensor> tensors = {
      to_device(torch::tensor({is_nan ? 0.0 : value, is_nan ? 1.0 : 0.0}, at::kDouble), device_)};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  start("all-reduce", what, [&] { return backend_->allreduce(tensors, options); }).wait();
  const at::Tensor greatest = tensors[0].to(at::kCPU);
  const double* const values = greatest.data_ptr<double>();
  return values[1] > 0 ? std::numeric_limits<double>::quiet_NaN() : values[0];
}

Traffic Group::traffic() const {
  return {counters_->all_gather, counters_->reduce_scatter, counters_->all_reduce,
          counters_->broadcast,  counters_->all_to_all,     counters_->sent};
}

}  // namespace tessera::dist
