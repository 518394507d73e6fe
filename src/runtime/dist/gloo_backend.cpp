#include "runtime/dist/gloo_backend.h"

#include <torch/types.h>

#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "base/blocked_sigpipe.h"

namespace tessera::dist {
namespace {

/// Cuts `tensor` into `size` equal parts, one per rank. Returns views.
std::vector<at::Tensor> splits_of(const at::Tensor& tensor, int size) {
  return tensor.view({size, -1}).unbind(0);
}

}  // namespace

/// The messages of one collective between this rank and all others.
class GlooBackend::Exchange final : public c10d::Work {
 public:
  Exchange(c10::intrusive_ptr<GlooBackend> backend, int tag)
      : backend_(std::move(backend)), tag_(tag) {}
  /// Passes unfinished messages to the backend, where they continue, because a cancelled message
  /// would block the connection.
  ~Exchange() override { backend_->keep(std::move(tensors_), std::move(messages_)); }
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  void send(const at::Tensor& tensor, int to) {
    std::vector<at::Tensor> tensors = keep(tensor);
    messages_.push_back(backend_->send(tensors, to, tag_));
  }
  void receive(const at::Tensor& tensor, int from) {
    std::vector<at::Tensor> tensors = keep(tensor);
    messages_.push_back(backend_->recv(tensors, from, tag_));
  }
  /// Makes `wait` call `action` after all messages have finished.
  void then(std::function<void()> action) { action_ = std::move(action); }

  bool wait(std::chrono::milliseconds timeout) override {
    for (; !messages_.empty(); messages_.pop_back()) messages_.back()->wait(timeout);
    tensors_.clear();
    if (const auto action = std::exchange(action_, nullptr)) action();
    return true;
  }

 private:
  std::vector<at::Tensor> keep(const at::Tensor& tensor) {
    tensors_.push_back(tensor);
    return {tensor};
  }

  c10::intrusive_ptr<GlooBackend> backend_;
  int tag_;
  std::vector<at::Tensor> tensors_;  // kept alive because the messages use their memory
  std::vector<c10::intrusive_ptr<c10d::Work>> messages_;
  std::function<void()> action_;
};

void GlooBackend::keep(std::vector<at::Tensor> tensors,
                       std::vector<c10::intrusive_ptr<c10d::Work>> messages) {
  if (messages.empty()) return;
  const std::lock_guard lock(kept_mutex_);
  kept_.push_back({std::move(tensors), std::move(messages)});
}

c10::intrusive_ptr<c10d::Work> GlooBackend::send(std::vector<at::Tensor>& tensors, int to,
                                                 int tag) {
  const BlockedSigpipe block;
  return ProcessGroupGloo::send(tensors, to, tag);
}

c10::intrusive_ptr<c10d::Work> GlooBackend::recv(std::vector<at::Tensor>& tensors, int from,
                                                 int tag) {
  const BlockedSigpipe block;  // a receiver writes that it is ready
  return ProcessGroupGloo::recv(tensors, from, tag);
}

/// Starts a collective with a new tag. All ranks start collectives in the same order, so a
/// collective has the same tag on all ranks.
c10::intrusive_ptr<GlooBackend::Exchange> GlooBackend::begin_exchange() {
  last_tag_ = last_tag_ == std::numeric_limits<int>::max() ? 1 : last_tag_ + 1;
  return c10::make_intrusive<Exchange>(
      c10::intrusive_ptr<GlooBackend>::unsafe_reclaim_from_nonowning(this), last_tag_);
}

c10::intrusive_ptr<c10d::Work> GlooBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                            const c10d::AllgatherOptions& options) {
  if (getSize() == 1 || !output.is_cpu()) {
    return ProcessGroupGloo::_allgather_base(output, input, options);
  }
  const auto exchange = begin_exchange();
  if (input.numel() == 0) return exchange;
  const std::vector<at::Tensor> splits = splits_of(output, getSize());
  const at::Tensor given = input.contiguous().view({-1});
  for (int distance = 1; distance < getSize(); ++distance) {
    const int from = (getRank() + getSize() - distance) % getSize();
    exchange->receive(splits[static_cast<std::size_t>(from)], from);
    exchange->send(given, (getRank() + distance) % getSize());
  }
  const at::Tensor& own = splits[static_cast<std::size_t>(getRank())];
  if (own.const_data_ptr() != given.const_data_ptr()) own.copy_(given);
  return exchange;
}

c10::intrusive_ptr<c10d::Work> GlooBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  if (getSize() == 1 || !input.is_cpu() || options.reduceOp != c10d::ReduceOp::SUM) {
    return ProcessGroupGloo::_reduce_scatter_base(output, input, options);
  }
  const auto exchange = begin_exchange();
  if (output.numel() == 0) return exchange;
  const std::vector<at::Tensor> splits = splits_of(input, getSize());
  std::vector<at::Tensor> received;
  for (int distance = 1; distance < getSize(); ++distance) {
    const int from = (getRank() + getSize() - distance) % getSize();
    exchange->receive(received.emplace_back(torch::empty(output.sizes(), output.options())), from);
    const int to = (getRank() + distance) % getSize();
    exchange->send(splits[static_cast<std::size_t>(to)], to);
  }
  const at::Tensor own = splits[static_cast<std::size_t>(getRank())].view(output.sizes());
  exchange->then([sum = output, own, received]() mutable {
    const at::NoGradGuard no_grad;
    at::add_out(sum, own, received.front());
    for (std::size_t i = 1; i < received.size(); ++i) sum.add_(received[i]);
  });
  return exchange;
}

}  // namespace tessera::dist
