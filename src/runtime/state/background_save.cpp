#include "runtime/state/background_save.h"

#include <ATen/DeviceAccelerator.h>
#include <torch/types.h>

#include <utility>

#include "base/streaming_copy.h"

namespace tessera::state {

BackgroundSave::~BackgroundSave() {
  finish();
  if (failure_) warn_of_failure();
}

void BackgroundSave::copy_tensors(SaveJob& job) {
  const at::NoGradGuard no_grad;
  std::size_t next = 0;
  for (std::size_t t = 0; t < job.held.size(); ++t) {
    std::vector<bool> is_read(job.held[t].size());
    for (const auto& sources : job.plan->copies[t].source_pieces) {
      for (const std::uint32_t piece : sources) is_read[piece] = true;
    }
    for (std::size_t i = 0; i < is_read.size(); ++i) {
      if (!is_read[i]) continue;
      at::Tensor& tensor = job.held[t][i].tensor;
      if (next == copies_.size()) copies_.emplace_back();
      at::Tensor& copy = copies_[next++];
      if (!copy.defined() || copy.numel() != tensor.numel() ||
          copy.scalar_type() != tensor.scalar_type()) {
        // Copies from an accelerator are faster if the host memory is pinned.
        const bool pinned = at::isAccelerator(tensor.device().type());
        copy = torch::empty({tensor.numel()},
                            at::TensorOptions(tensor.scalar_type()).pinned_memory(pinned));
      }
      if (tensor.is_cpu()) {
        streaming_copy(copy.data_ptr(), tensor.data_ptr(), tensor.nbytes());
      } else {
        copy.copy_(tensor.view({-1}));
      }
      tensor = copy;
    }
  }
}

void BackgroundSave::start(std::shared_ptr<SaveJob> job, Rendezvous& rendezvous) {
  thread_ = std::thread([this, job = std::move(job), &rendezvous] {
    try {
      job->run(rendezvous);
    } catch (...) {
      failure_ = std::current_exception();
    }
  });
}

void BackgroundSave::finish() {
  if (thread_.joinable()) thread_.join();
}

void BackgroundSave::wait() {
  finish();
  if (const auto failure = std::exchange(failure_, nullptr)) std::rethrow_exception(failure);
}

void BackgroundSave::warn_of_failure() const noexcept {
  try {
    std::rethrow_exception(failure_);
  } catch (const std::exception& error) {
    TORCH_WARN(
        "a save in the background failed, and TrainState::wait was not called to get the error: ",
        error.what());
  }
}

}  // namespace tessera::state
