#include "base/outside_failure.h"
#include "tessera/reshard/executor.h"

#include <atomic>
#include <new>
#include <optional>
#include <utility>

#include "formats/partly_read.h"
#include "formats/staging/staged_destination.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::reshard {
namespace {

formats::ProgressSink counting(std::atomic<std::uint64_t>& count, formats::ProgressSink sink) {
  return [&count, sink = std::move(sink)](std::uint64_t nbytes) {
    count += nbytes;
    if (sink) sink(nbytes);
  };
}

/// Returns the bytes of all pieces that the writer writes.
std::uint64_t nbytes_to_write(const formats::CheckpointWriter& writer) {
  std::uint64_t nbytes = 0;
  for (const auto& [tensor_index, piece_index] : writer.write_order()) {
    const formats::TensorEntry& tensor = writer.contents().tensors[tensor_index];
    nbytes += nbytes_of(tensor.pieces[piece_index].region, tensor.meta.dtype);
  }
  return nbytes;
}

/// Returns the line that says where the kept work is, and how much of the whole work is done.
std::string kept_line(const formats::CheckpointWriter& writer, const std::string& destination,
                      std::uint64_t done_nbytes, std::uint64_t all_nbytes) {
  const std::uint64_t percent = all_nbytes == 0 ? 0 : done_nbytes * 100 / all_nbytes;
  // An interrupted run may have finished more than this run has checked so far.
  return "kept: " + printable(formats::StagedDestination::staging_path_of(destination)) + ", " +
         (writer.is_resumed() ? "at least " : "") + std::to_string(percent) + "% done";
}

/// Returns a line about a file in the staging directory that Tessera did not write; nothing if
/// Tessera wrote all files.
std::optional<std::string> stays_line(const FileSystem& fs, const std::string& destination) {
  const std::string staging_path = formats::StagedDestination::staging_path_of(destination);
  if (fs.kind_of(staging_path) != FileKind::directory) return std::nullopt;
  const auto name = formats::StagedDestination::first_foreign_entry_in_work(fs, staging_path);
  if (!name) return std::nullopt;
  return "not removed: " + printable(join_path(staging_path, *name)) +
         ", which Tessera did not write; move or rename " + printable(staging_path) +
         " before the next run";
}

}  // namespace

std::uint64_t finish_or_keep(const Plan& plan, const formats::CheckpointReader& reader,
                             formats::CheckpointWriter& writer, FileSystem& fs,
                             const std::string& destination, ExecuteOptions options) {
  std::atomic<std::uint64_t> done_nbytes = 0;
  std::atomic<std::uint64_t> resumed_nbytes = 0;
  options.progress = counting(done_nbytes, std::move(options.progress));
  options.resumed = counting(resumed_nbytes, std::move(options.resumed));
  // A writer whose commit has failed no longer has its order.
  const std::uint64_t all_nbytes = nbytes_to_write(writer);
  const auto kept = [&] { return kept_line(writer, destination, done_nbytes, all_nbytes); };
  try {
    finish_move(plan, reader, writer, options);
  } catch (const formats::DamagedStorage& error) {
    // The finished blocks are damaged, so they are not kept, even if a run before wrote some.
    const std::string staging_path = formats::StagedDestination::staging_path_of(destination);
    const auto stays = stays_line(fs, destination);
    if (writer.is_resumed()) {
      fs.remove_all(formats::StagedDestination::journal_path_of(staging_path));
      if (!stays) fs.remove_all(staging_path);
    }
    if (!stays) throw;
    throw Error::listing(error.kind(), error.where(), error.reason(), *stays, error.remedy());
  } catch (const Error& error) {
    // A file is in the way. The user can move it and resume.
    const bool is_obstacle = error.kind() == ErrorKind::already_exists;
    const bool is_passing = is_obstacle || tessera::detail::is_outside_failure(error);
    if ((!is_passing && !writer.is_resumed()) || !writer.keep_work()) {
      const auto stays = stays_line(fs, destination);
      if (!stays) throw;
      throw Error::listing(error.kind(), error.where(), error.reason(), *stays, error.remedy());
    }
    throw Error::listing(error.kind(), error.where(), error.reason(), kept(),
                         {Remedy::Action::resume_or_discard});
  } catch (const std::bad_alloc&) {
    if (!writer.keep_work()) throw;
    throw Error::listing(ErrorKind::io, {}, "out of memory", kept() + "; it can be resumed",
                         {Remedy::Action::use_less_memory});
  }
  return resumed_nbytes;
}

}  // namespace tessera::reshard
