#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "formats/staging/staged_destination.h"
#include "runtime/state/live_checkpoint.h"
#include "runtime/state/rendezvous.h"
#include "tessera/base/file_system.h"
#include "tessera/reshard/planner.h"
#include "tessera/runtime/state/train_state.h"

namespace tessera::state {

/// Returns the format of the ranks' parts: native if `format` needs a single writer.
formats::Format format_of_parts(formats::Format format);

/// How rank 0 writes the single file, if the format needs a single writer.
struct OneFile {
  reshard::Plan plan;
  std::unique_ptr<formats::CheckpointWriter> writer;
};

/// What one rank does in a save, after planning.
struct SaveJob {
  SaveOptions options;
  std::string path;  // of the checkpoint
  std::shared_ptr<const LiveState> live;
  std::shared_ptr<const reshard::Plan> plan;
  std::vector<std::vector<LocalShard>> held;  // what to write: the trainer's memory, or a copy
  formats::CheckpointContents contents;       // of the whole checkpoint, with values
  std::vector<Value> values;                  // parallel to contents.values
  std::string directory;                      // where parts are written
  std::unique_ptr<formats::StagedDestination> staged;  // on rank 0; removes all unless committed
  std::optional<OneFile> one_file;  // on rank 0, for formats with a single writer
  std::exception_ptr failure;       // of this rank; not yet reported to the others

  /// Runs code that may fail on this rank only; `raise_failure` throws its error later.
  template <class Body>
  void hold_failure(const Body& body) {
    try {
      body();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  /// Throws the held error. Call it where ranks exchange errors.
  void raise_failure() const {
    if (failure) std::rethrow_exception(failure);
  }

  /// Starts the single file on rank 0. Throws if the format cannot hold the contents.
  void start_one_file();

  /// Writes the parts, joins and seals them, and moves the checkpoint to its path. May run on any
  /// thread. Collective. Throws on all ranks if a rank fails.
  void run(Rendezvous& rendezvous);

 private:
  void finish();
};

}  // namespace tessera::state
