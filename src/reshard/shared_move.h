#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tessera/formats/create.h"
#include "tessera/reshard/executor.h"

// One move by several processes (workers), which send each other no messages:
// [Note: Shared work] in formats/staging/shared_work.h. Each worker calls `move_share` with the
// same source and options, and with a share of its own.
namespace tessera::reshard {

/// What one worker of a move does.
struct SharedMoveOptions {
  /// Whether to write, after its own share, the shares that no living worker holds.
  enum class OtherShares { leave, take_over };

  int share = 0;       // of this worker, from 0
  int num_shares = 1;  // the number of workers
  OtherShares other_shares = OtherShares::leave;
  std::string command{};  // for whoever finishes the move (SharedWork::command)
  /// Called before a share is written, with its number and its bytes.
  std::function<void(int share, std::uint64_t nbytes)> begins{};
};

/// What a worker has done.
struct SharedMoveOutcome {
  /// A share that this worker has written.
  struct Share {
    int index = 0;
    std::uint64_t nbytes = 0;
    std::uint64_t resumed_nbytes = 0;  // of these, what an interrupted worker had written
    bool was_complete = false;         // before this worker came
  };
  /// A share that is not complete.
  struct Missing {
    int index = 0;
    std::string state;  // such as `was never begun`
  };

  std::vector<Share> shares{};
  std::vector<Missing> missing{};
  bool is_finished = false;  // the destination has appeared
};

/// Writes one share of a move, and records durably what it has finished. If all shares are complete
/// then, makes the destination appear, with the bytes that one process writes. Another worker may
/// do the same at the same time.
/// Requires: `create.journal`. `plan.problems` is empty.
/// Throws: what start_move and finish_move throw, with the same kept work, of the share alone;
/// Error(unsupported) if the format cannot be written by several processes, or if the file system
/// has no locks; Error(already_exists) if another process writes the share; Error(mismatch) naming
/// the difference if another worker has another source, plan, options or number of shares.
SharedMoveOutcome move_share(const Plan& plan, const formats::CheckpointReader& reader,
                             FileSystem& fs, const std::string& destination,
                             formats::CreateOptions create, const SharedMoveOptions& worker,
                             const ExecuteOptions& options);

/// Makes the destination appear if all shares are complete. Writes no share. Throws: as move_share.
SharedMoveOutcome finish_shares(const Plan& plan, const formats::CheckpointReader& reader,
                                FileSystem& fs, const std::string& destination,
                                formats::CreateOptions create);

}  // namespace tessera::reshard
