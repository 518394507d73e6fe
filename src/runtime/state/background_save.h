#pragma once

#include <ATen/core/Tensor.h>

#include <exception>
#include <memory>
#include <thread>
#include <vector>

#include "runtime/state/rendezvous.h"
#include "runtime/state/save_job.h"

namespace tessera::state {

/// Runs saves, one at a time, on a thread of its own while training continues
/// (`SaveOptions::async`). Owns the thread, and a copy of what this rank writes. The destructor
/// waits for the save, and warns of a failure that `wait` has not thrown. Not thread-safe.
class BackgroundSave {
 public:
  BackgroundSave() = default;
  ~BackgroundSave();
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;

  /// Replaces the tensors that `job` will write by flat copies in host memory, so that training can
  /// continue. Reuses the memory of the last copies. Requires: no save runs.
  void copy_tensors(SaveJob& job);
  /// Starts `job.run(rendezvous)`. Requires: no save runs; `rendezvous` outlives the save.
  void start(std::shared_ptr<SaveJob> job, Rendezvous& rendezvous);
  /// Waits until the save has ended, even if it failed.
  void finish();
  /// As `finish`, but throws the error of a save that failed, once.
  void wait();

 private:
  void warn_of_failure() const noexcept;

  std::vector<at::Tensor> copies_;  // their memory is used again by the next save
  std::thread thread_;
  std::exception_ptr failure_;  // error of the last save that was not thrown yet
};

}  // namespace tessera::state
