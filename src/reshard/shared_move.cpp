#include <algorithm>
#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "base/current_stop.h"
#include "base/network_file_system.h"
#include "formats/partly_read.h"
#include "formats/staging/shared_work.h"
#include "formats/staging/staged_destination.h"
#include "formats/staging/staged_work.h"
#include "reshard/execute_blocks.h"
#include "reshard/work_shares.h"
#include "tessera/base/error.h"
#include "tessera/formats/format_driver.h"
#include "tessera/formats/format_writer.h"
#include "tessera/reshard/executor.h"

namespace tessera::reshard {
namespace {

using formats::CheckpointReader;
using formats::CreateOptions;
using formats::KeptWork;
using formats::SharedWork;
using formats::ShareOptions;
using formats::ShareWriter;

/// To check the CRC of a storage, a worker reads bytes beyond its share, but at most this multiple
/// of what it read of the storage. If two workers share a storage, usually neither checks its CRC.
constexpr double kMostRestOfShare = 0.05;

/// A move by several processes, as one of them sees it.
class SharedMove {
 public:
  SharedMove(const Plan& plan, const CheckpointReader& reader, FileSystem& fs,
             const std::string& destination, CreateOptions create,
             const std::optional<FileStates>& source_files)
      : plan_(plan),
        reader_(reader),
        fs_(fs),
        destination_(destination),
        create_(std::move(create)),
        values_(prepare_move(plan, reader, create_, source_files)),
        work_(fs, destination) {
    TESSERA_CHECK(plan.problems.empty());
  }

  const SharedWork& work() const { return work_; }
  void set_kept_work(KeptWork kept_work) { create_.journal->kept_work = kept_work; }

  /// Writes one share. Returns nothing if the share was complete already. `beginning` says whether
  /// this call may begin the move if no other worker has begun it.
  std::optional<SharedMoveOutcome::Share> write(const SharedMoveOptions& worker, int share,
                                                ShareOptions::Beginning beginning,
                                                const ExecuteOptions& options) const;
  /// Makes the destination appear if all shares are complete; otherwise lists the missing ones.
  void finish(SharedMoveOutcome& outcome, const std::stop_token& stop);

 private:
  std::unique_ptr<ShareWriter> start(const ShareOptions& share) const;
  void write_blocks(ShareWriter& writer, const BlocksOfShare& blocks,
                    const ExecuteOptions& options) const;

  const Plan& plan_;
  const CheckpointReader& reader_;
  FileSystem& fs_;
  const std::string& destination_;
  CreateOptions create_;
  const std::vector<Value> values_;
  SharedWork work_;
};

std::unique_ptr<ShareWriter> SharedMove::start(const ShareOptions& share) const {
  auto writer = with_clearer_refusal(plan_, reader_, [&] {
    return formats::writer_of(create_.format)
        .start_share(fs_, destination_, formats::SharedContents::of(plan_.destination), values_,
                     create_, share);
  });
  if (writer) return writer;
  throw Error(ErrorKind::unsupported, {.path = destination_},
              "format: one process must write all of " + std::string(create_.format.name()));
}

std::optional<SharedMoveOutcome::Share> SharedMove::write(const SharedMoveOptions& worker,
                                                          int share,
                                                          ShareOptions::Beginning beginning,
                                                          const ExecuteOptions& options) const {
  // A suspended worker may hold the lock for which this one waits.
  std::optional<tessera::detail::CurrentStop> waiting;
  if (options.stop.stop_possible()) waiting.emplace(options.stop);
  const auto writer = start({.index = share,
                             .num_shares = worker.num_shares,
                             .command = worker.command,
                             .beginning = beginning});
  waiting.reset();
  const bool was_complete = work_.is_complete(share);
  // If the share was complete, another worker may have finished the whole move.
  if (was_complete || !work_.is_begun()) return std::nullopt;
  const BlocksOfShare blocks =
      divide_blocks(*writer, worker.num_shares)[static_cast<std::size_t>(share)];
  if (worker.begins) worker.begins(share, blocks.nbytes);
  if (blocks.divides_file && worker.warns &&
      tessera::detail::is_on_nfs(directory_of(destination_))) {
    worker.warns("part " + std::to_string(share) +
                 " begins or ends within a file on NFS, where bytes that two machines write side "
                 "by side may be lost (to avoid this, write native, or as many ranks or files as "
                 "parts; then verify the result)");
  }
  std::atomic<std::uint64_t> resumed_nbytes = 0;
  ExecuteOptions counting = options;
  counting.resumed = [&](std::uint64_t nbytes) {
    resumed_nbytes += nbytes;
    if (options.resumed) options.resumed(nbytes);
  };
  try {
    write_blocks(*writer, blocks, counting);
  } catch (const formats::DamagedStorage&) {
    fs_.remove_all(work_.journal_path(share));  // so that the next run moves all blocks again
    throw;
  }
  return SharedMoveOutcome::Share{share, blocks.nbytes, resumed_nbytes};
}

/// Writes the blocks of a share. An error says whether the finished blocks are kept, and whether
/// the staging path stays.
void SharedMove::write_blocks(ShareWriter& writer, const BlocksOfShare& blocks,
                              const ExecuteOptions& options) const {
  const std::string staging_path = formats::StagedDestination::staging_path_of(destination_);
  const auto kept = [&] {
    return "kept: the finished blocks of this part, in " + printable(staging_path);
  };
  ExecuteOptions with_path = options;
  with_path.source_path = reader_.path();
  const FileStates before =
      options.source_files ? *options.source_files : source_file_states(reader_);
  try {
    execute_blocks(plan_, reader_, writer, with_path, blocks.ranges);
    formats::check_rest(reader_, {.most_rest = kMostRestOfShare, .stop = options.stop});
    require_unchanged(before, source_file_states(reader_));
    if (options.stop.stop_requested()) throw Error(ErrorKind::interrupted, {}, "interrupted");
    writer.commit_share();
  } catch (const formats::DamagedStorage&) {
    throw;  // the finished blocks are damaged
  } catch (const Error& error) {
    if (writer.keep_work()) {
      throw Error::listing(error.kind(), error.where(), error.reason(), kept(),
                           {Remedy::Action::resume_or_discard});
    }
    if (!fs_.kind_of(staging_path)) throw;
    throw Error::listing(error.kind(), error.where(), error.reason(),
                         "not removed: " + printable(staging_path) + ", for the other parts",
                         error.remedy());
  } catch (const std::bad_alloc&) {
    throw Error::listing(ErrorKind::io, {}, "out of memory", kept(),
                         {Remedy::Action::use_less_memory});
  }
}

void SharedMove::finish(SharedMoveOutcome& outcome, const std::stop_token& stop) {
  const auto lock = work_.lock(stop);
  if (!work_.is_begun()) {
    work_.clean_up();  // another worker has finished the move while this one waited for the lock
    outcome.is_finished = fs_.kind_of(destination_).has_value();
    return;
  }
  work_.require_same(formats::work_options(create_).journal->identity, work_.num_shares());
  for (auto& [share, state] : work_.incomplete_shares()) {
    outcome.missing.push_back({share, std::move(state)});
  }
  if (!outcome.missing.empty()) return;
  const auto writer = start({.step = ShareOptions::Step::finish});
  for (const auto id : writer->write_order()) {
    const auto& tensor = plan_.destination.tensors[id.tensor_index];
    const std::int64_t numel =
        numel_of(writer->contents().tensors[id.tensor_index].pieces[id.piece_index].region);
    TESSERA_CHECK(tensor.meta.fqn == writer->contents().tensors[id.tensor_index].meta.fqn);
    const std::int64_t step = writer->block_numel(id);
    for (std::int64_t begin = 0; begin < numel; begin += step) writer->adopt_block(id, begin);
  }
  writer->commit();
  outcome.is_finished = true;
}

/// Adds up what the casts of several shares lose, so that each tensor is reported once.
class LossesOfShares {
 public:
  /// Makes `options` count losses here instead of calling its own functions. Must outlive it.
  void count_in(ExecuteOptions& options) {
    if (options.overflowed) {
      options.overflowed = [this](const TensorOverflow& each) {
        const auto [known, is_new] = overflows_.emplace(each.tensor_index, each);
        if (is_new) return;
        known->second.num_elements += each.num_elements;
        known->second.largest_magnitude =
            std::max(known->second.largest_magnitude, each.largest_magnitude);
      };
    }
    if (options.underflowed) {
      options.underflowed = [this](const TensorUnderflow& each) {
        const auto [known, is_new] = underflows_.emplace(each.tensor_index, each);
        if (!is_new) known->second.num_elements += each.num_elements;
      };
    }
  }
  void report(const ExecuteOptions& options) const {
    for (const auto& [tensor_index, each] : overflows_) options.overflowed(each);
    for (const auto& [tensor_index, each] : underflows_) options.underflowed(each);
  }

 private:
  std::map<std::size_t, TensorOverflow> overflows_;
  std::map<std::size_t, TensorUnderflow> underflows_;
};

}  // namespace

SharedMoveOutcome move_share(const Plan& plan, const CheckpointReader& reader, FileSystem& fs,
                             const std::string& destination, CreateOptions create,
                             const SharedMoveOptions& worker, const ExecuteOptions& options) {
  TESSERA_CHECK(0 <= worker.share && worker.share < worker.num_shares);
  SharedMove move(plan, reader, fs, destination, std::move(create), options.source_files);
  SharedMoveOutcome outcome;
  LossesOfShares losses;
  ExecuteOptions counting = options;
  losses.count_in(counting);
  const auto own = move.write(worker, worker.share, ShareOptions::Beginning::allowed, counting);
  outcome.shares.push_back(
      own.value_or(SharedMoveOutcome::Share{.index = worker.share, .was_complete = true}));
  if (worker.other_shares == SharedMoveOptions::OtherShares::take_over) {
    move.set_kept_work(KeptWork::resume);
    for (int step = 1; step < worker.num_shares; ++step) {
      const int share = (worker.share + step) % worker.num_shares;
      if (!move.work().is_begun()) break;  // another worker has finished the move
      try {
        if (move.work().is_complete(share) || !move.work().try_lock_share(share)) continue;
        const auto taken = move.write(worker, share, ShareOptions::Beginning::refused, counting);
        if (taken) outcome.shares.push_back(*taken);
      } catch (const Error& error) {
        // Another worker has just locked the share or finished the move: not an error.
        if (error.kind() != ErrorKind::already_exists && move.work().is_begun()) throw;
      }
    }
  }
  losses.report(options);
  move.finish(outcome, options.stop);
  return outcome;
}

SharedMoveOutcome finish_shares(const Plan& plan, const CheckpointReader& reader, FileSystem& fs,
                                const std::string& destination, CreateOptions create,
                                const std::stop_token& stop,
                                const std::optional<FileStates>& source_files) {
  SharedMove move(plan, reader, fs, destination, std::move(create), source_files);
  SharedMoveOutcome outcome;
  move.finish(outcome, stop);
  return outcome;
}

}  // namespace tessera::reshard
