#pragma once

#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <vector>

namespace tessera::dist {

/// c10d's Gloo backend, with Tessera's all-gather and reduce-scatter for CPU tensors: they send
/// elements directly from one rank's tensors into another's. In torch 2.11, c10d's all-gather uses
/// a buffer as large as the result, and its reduce-scatter is an all-reduce of a copy, which sends
/// twice as much. Do not write inputs or use outputs before `wait`. Without a call of `wait`, the
/// messages continue in the background (a reduce-scatter never adds them up), and the tensors stay
/// alive until the backend is destroyed. If a rank dies during a message, others time out.
class GlooBackend final : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override;
  /// Sends as c10d's, but a write to the connection of a rank that has died is only an error.
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override;
  /// Sums the ranks' elements in the tensors' dtype, always in the same order.
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;

 private:
  class Exchange;
  struct Kept {
    std::vector<at::Tensor> tensors;  // destroyed last, because the messages use them
    std::vector<c10::intrusive_ptr<c10d::Work>> messages;
  };

  c10::intrusive_ptr<Exchange> begin_exchange();
  /// Keeps unfinished messages and their tensors until the backend is destroyed.
  void keep(std::vector<at::Tensor> tensors, std::vector<c10::intrusive_ptr<c10d::Work>> messages);

  int last_tag_ = 0;  // 0 is the tag of `send`
  std::mutex kept_mutex_;
  std::vector<Kept> kept_;
};

}  // namespace tessera::dist
