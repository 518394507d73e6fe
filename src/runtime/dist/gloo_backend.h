#pragma once

#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <vector>

namespace tessera::dist {

/// Gloo, with an all-gather and a reduce-scatter of its own for tensors on the CPU: parts go from
/// the tensors of one rank straight into those of another. c10d's all-gather goes by way of a
/// buffer as large as the result, and its reduce-scatter is an all-reduce of a copy, which sends
/// twice as much (seen in torch 2.11). What goes in and what comes out may not be touched until
/// both have been waited for; one that never is goes on by itself, and keeps its tensors until the
/// backend dies. A rank that dies in the middle of a message is noticed at the time-out.
class GlooBackend final : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& whole, at::Tensor& part,
                                                 const c10d::AllgatherOptions& options) override;
  /// Adds up in the tensors' dtype, in an order that is the same each time.
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& part, at::Tensor& whole, const c10d::ReduceScatterOptions& options) override;

 private:
  class Exchange;
  struct Kept {
    std::vector<at::Tensor> tensors;  // whose memory the messages use: they go first
    std::vector<c10::intrusive_ptr<c10d::Work>> messages;
  };

  c10::intrusive_ptr<Exchange> begin_exchange();
  /// Keeps the messages of a collective that was dropped without a wait, until the backend dies.
  void keep(std::vector<at::Tensor> tensors, std::vector<c10::intrusive_ptr<c10d::Work>> messages);

  int last_tag_ = 0;  // 0 is that of what is sent by itself
  std::mutex kept_mutex_;
  std::vector<Kept> kept_;
};

}  // namespace tessera::dist
