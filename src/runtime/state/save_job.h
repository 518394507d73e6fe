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

/// Returns the format of the parts that ranks write: of formats that take a single writer, native.
formats::Format format_of_parts(formats::Format format);

/// What rank 0 moves parts to, where the format takes a single writer.
struct OneFile {
  reshard::Plan plan;
  std::unique_ptr<formats::CheckpointWriter> writer;
};

/// One rank's half of a save, from the plan on.
struct SaveJob {
  SaveOptions options;
  std::string path;  // of the checkpoint
  std::shared_ptr<const LiveState> live;
  std::shared_ptr<const reshard::Plan> plan;
  std::vector<std::vector<TensorPart>> held;  // what is written: the trainer's memory, or a copy
  formats::CheckpointContents contents;       // of the whole checkpoint, with values
  std::vector<Value> values;                  // parallel to contents.values
  std::string directory;                      // where parts are written
  std::unique_ptr<formats::StagedDestination>
      staged;                       // on rank 0; dies without a commit: removes all
  std::optional<OneFile> one_file;  // on rank 0; for such a format
  std::exception_ptr failure;       // of this rank, which the others do not know yet

  /// Does what may fail on this rank alone while others are on their way to the next meeting.
  template <class Body>
  void hold_failure(const Body& body) {
    try {
      body();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  /// Throws what has failed. To be called where ranks meet.
  void raise_failure() const {
    if (failure) std::rethrow_exception(failure);
  }

  /// Starts what a single writer writes, on rank 0. Throws what the format refuses.
  void start_one_file();

  /// Writes, joins, seals, and makes the checkpoint appear. Runs on any thread. Collective; throws
  /// on all ranks where one fails.
  void run(Rendezvous& rendezvous);

 private:
  void finish();
};

}  // namespace tessera::state
