#include "tessera/reshard/executor.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <ranges>
#include <set>
#include <utility>
#include <vector>

#include "base/cast.h"
#include "base/checked_math.h"
#include "formats/gatherer.h"
#include "formats/key_paths.h"
#include "formats/name_pattern.h"
#include "formats/partly_read.h"
#include "formats/read_announcement.h"
#include "formats/staging/shared_work.h"
#include "formats/stored_chunks.h"
#include "reshard/cast_losses.h"
#include "reshard/execute_blocks.h"
#include "reshard/file_states.h"
#include "reshard/in_memory_writer.h"
#include "reshard/piece_index.h"
#include "reshard/resume_identity.h"
#include "reshard/row_wise_merge.h"
#include "tessera/base/parallel.h"
#include "tessera/formats/format_writer.h"

namespace tessera::reshard {
namespace {

using formats::CheckpointReader;
using formats::CheckpointWriter;
using formats::TensorEntry;
using formats::TensorSource;
using formats::detail::Gatherer;
using tessera::detail::ByteBuffer;
using PieceId = CheckpointWriter::PieceId;

/// The bytes that readers and writers need per thread to decode or encode one block.
constexpr std::uint64_t kCodecNbytes = std::uint64_t{4} << 20;

/// The buffers of one thread for one block.
struct Workspace {
  ByteBuffer block;   // elements in the destination's dtype
  ByteBuffer uncast;  // elements in the source's dtype, if it differs
  ByteBuffer window;  // source bytes that one read brings for several contiguous runs
  ByteBuffer merge;   // rows of one column shard, for a merge of row-wise state
};

/// A pool that lends each running task a workspace of its own.
class WorkspacePool {
 public:
  std::unique_ptr<Workspace> take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return std::make_unique<Workspace>();
    auto workspace = std::move(free_.back());
    free_.pop_back();
    return workspace;
  }
  void give_back(std::unique_ptr<Workspace> workspace) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(workspace));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Workspace>> free_;
};

class Execution {
 public:
  Execution(const Plan& plan, const TensorSource& source, CheckpointWriter& writer,
            const ExecuteOptions& options)
      : plan_(plan),
        source_(source),
        writer_(writer),
        memory_(dynamic_cast<InMemoryWriter*>(&writer)),
        chunk_source_(dynamic_cast<const formats::ChunkSource*>(&source)),
        chunk_sink_(dynamic_cast<formats::ChunkSink*>(&writer)),
        options_(options),
        order_(writer.write_order()) {
    for (std::size_t piece = 0; piece < order_.size(); ++piece) {
      const PieceId id = order_[piece];
      // If the writer numbered its pieces differently, bytes would go to wrong places.
      TESSERA_CHECK(writer.contents().tensors[id.tensor_index].pieces[id.piece_index].region ==
                    region_of(id));
      const std::int64_t numel = numel_of(region_of(id));
      const std::int64_t block_numel = writer.block_numel(id);
      add_blocks(piece, ceil_div(numel, block_numel));
      thread_nbytes_ = std::max(thread_nbytes_, workspace_nbytes(id, std::min(block_numel, numel)));
    }
    find_replicas();
  }

  void run() { run({{0, num_blocks_}}); }

  /// Moves the blocks of `ranges`, which are ascending.
  void run(const std::vector<BlockRange>& ranges) {
    const int wanted = options_.num_threads > 0 ? options_.num_threads : default_num_threads();
    const std::uint64_t affordable = options_.memory_nbytes / thread_nbytes_;
    if (affordable == 0) {
      throw Error::expected(ErrorKind::invalid_argument, {}, "memory",
                            "at least " + std::to_string(thread_nbytes_) + " bytes for one block",
                            std::to_string(options_.memory_nbytes) + " bytes");
    }
    const int num_threads =
        static_cast<int>(std::min<std::uint64_t>(static_cast<std::uint64_t>(wanted), affordable));
    try {
      std::int64_t num_tasks = 0;
      std::vector<std::int64_t> first_tasks;  // one per range: number of its first task
      for (const BlockRange& range : ranges) {
        first_tasks.push_back(num_tasks);
        num_tasks += range.num_blocks();
      }
      const auto announced = announce(ranges);
      parallel_for(num_tasks, num_threads, {}, [&](std::int64_t task) {
        const auto range = static_cast<std::size_t>(std::ranges::upper_bound(first_tasks, task) -
                                                    first_tasks.begin() - 1);
        const std::int64_t block = ranges[range].begin + task - first_tasks[range];
        try {
          throw_if_stopped();  // here, so that threads which wait for this block wake
          move_block(block);
        } catch (...) {
          writer_.abandon();  // wakes threads that wait inside the writer for this block
          note_unmoved(block);
          throw;
        }
      });
    } catch (const RefusedOverflow&) {
      count_unmoved_blocks();
      refuse_overflow(losses_.first_too_large());
    }
    report_losses();
  }

 private:
  /// Tells files at URLs what the blocks of `ranges`, which are ascending, need of them.
  std::unique_ptr<object_store::AnnouncedReads> announce(
      const std::vector<BlockRange>& ranges) const {
    formats::ReadAnnouncement reads(source_);
    auto range = ranges.begin();
    for (std::size_t i = 0; reads.is_useful() && i < order_.size(); ++i) {
      const PieceBlocks piece = blocks_of(i);
      const std::int64_t end = i + 1 < order_.size() ? blocks_of(i + 1).first_block : num_blocks_;
      while (range != ranges.end() && range->end <= piece.first_block) ++range;
      for (auto each = range; each != ranges.end() && each->begin < end; ++each) {
        const std::int64_t first = std::max(each->begin, piece.first_block);
        const std::int64_t last = std::min(each->end, end) - 1;
        if (first > last) continue;
        const TensorCopy& copy = plan_.copies[piece.id.tensor_index];
        const auto& source_pieces = copy.source_pieces[piece.id.piece_index];
        if (copy.merged_widths.empty()) {
          reads.add_gathered(copy.source_tensor, source_pieces, source_region_of(piece.id),
                             {window_of(piece, first).begin, window_of(piece, last).end});
        } else {
          for (const auto p : source_pieces) reads.leave_out(copy.source_tensor, p);
        }
      }
    }
    return reads.announce();
  }

  /// Thrown by a block that has numbers too large for the new dtype, to end the move.
  struct RefusedOverflow {};

  void throw_if_stopped() const {
    if (options_.stop.stop_requested()) throw Error(ErrorKind::interrupted, {}, "interrupted");
  }

  /// A piece and the number of its first block.
  struct PieceBlocks {
    PieceId id;
    std::int64_t first_block;
    bool is_replica;  // only if its elements change: see find_replicas
  };

  /// Adds the blocks of a piece. Call it for all pieces, in their order.
  void add_blocks(std::size_t piece, std::int64_t num_blocks) {
    if (num_blocks != 1 && first_blocks_.empty()) {
      first_blocks_.resize(piece + 1);
      std::iota(first_blocks_.begin(), first_blocks_.end(), std::int64_t{0});
    } else if (!first_blocks_.empty()) {
      first_blocks_.push_back(num_blocks_);
    }
    num_blocks_ += num_blocks;
  }
  PieceBlocks blocks_of(std::size_t piece) const {
    return {order_[piece],
            first_blocks_.empty() ? static_cast<std::int64_t>(piece) : first_blocks_[piece],
            !is_replica_.empty() && is_replica_[piece]};
  }

  /// Finds the replicas (pieces with the region of an earlier piece), so that what a cast loses is
  /// counted once for each element. Looks only at tensors that a cast or a merge changes.
  void find_replicas() {
    const auto region = [&](std::size_t piece) -> const Region& {
      return region_of(order_[piece]);
    };
    const auto is_before = [&](std::size_t a, std::size_t b) {
      const auto tensor_a = order_[a].tensor_index, tensor_b = order_[b].tensor_index;
      return tensor_a != tensor_b ? tensor_a < tensor_b : region(a) < region(b);
    };
    std::set<std::size_t, decltype(is_before)> firsts(is_before);
    for (std::size_t i = 0; i < order_.size(); ++i) {
      if (is_copied(order_[i]) || firsts.insert(i).second) {
        continue;
      }
      is_replica_.resize(order_.size());
      is_replica_[i] = true;
    }
  }

  const TensorEntry& destination_of(PieceId id) const {
    return plan_.destination.tensors[id.tensor_index];
  }
  const Region& region_of(PieceId id) const {
    return destination_of(id).pieces[id.piece_index].region;
  }
  Region source_region_of(PieceId id) const {
    return region_in_source(plan_.copies[id.tensor_index], region_of(id),
                            destination_of(id).meta.shape);
  }
  DType source_dtype_of(PieceId id) const {
    return source_.contents().tensors[plan_.copies[id.tensor_index].source_tensor].meta.dtype;
  }

  /// Whether a piece gets the source's bytes as they are.
  bool is_copied(PieceId id) const {
    return source_dtype_of(id) == destination_of(id).meta.dtype &&
           plan_.copies[id.tensor_index].merged_widths.empty();
  }

  std::uint64_t workspace_nbytes(PieceId id, std::int64_t block_numel) const {
    const auto numel = static_cast<std::uint64_t>(block_numel);
    const DType destination_dtype = destination_of(id).meta.dtype;
    std::uint64_t nbytes =
        numel * itemsize(destination_dtype) + formats::detail::kGatherNbytes + kCodecNbytes;
    if (source_dtype_of(id) != destination_dtype) nbytes += numel * itemsize(source_dtype_of(id));
    if (!plan_.copies[id.tensor_index].merged_widths.empty()) {
      nbytes += merge_nbytes(block_numel, source_dtype_of(id));
    }
    return nbytes;
  }

  void report_losses() const {
    for (const auto& [tensor_index, losses] : losses_.by_tensor()) {
      if (losses.num_too_large != 0 && options_.overflowed) {
        options_.overflowed({tensor_index, losses.num_too_large, losses.largest_magnitude});
      }
      if (losses.num_became_zero != 0 && options_.underflowed) {
        options_.underflowed({tensor_index, losses.num_became_zero});
      }
    }
  }

  PieceBlocks piece_with(std::int64_t block) const {
    if (first_blocks_.empty()) return blocks_of(static_cast<std::size_t>(block));
    const auto next = std::ranges::upper_bound(first_blocks_, block);
    return blocks_of(static_cast<std::size_t>(next - first_blocks_.begin() - 1));
  }

  void move_block(std::int64_t block) {
    const PieceBlocks piece = piece_with(block);
    const PieceId id = piece.id;
    const FlatRange window = window_of(piece, block);

    auto workspace = pool_.take();
    if (memory_ != nullptr && is_copied(id)) {
      const std::span<std::byte> bytes = memory_->memory_of(id, window);
      fetch(id, window, *workspace, bytes);
      if (options_.progress) options_.progress(bytes.size());
      pool_.give_back(std::move(workspace));
      return;
    }
    std::span<std::byte> bytes = room_for(id, window, *workspace);
    if (writer_.resume_block(id, window.begin, bytes)) {
      if (options_.resumed) options_.resumed(bytes.size());
      if (!piece.is_replica && counts_kept_blocks(id)) {
        losses_.add(id.tensor_index, block, fetch(id, window, *workspace, bytes));
      }
    } else if (!move_chunk(id, window, *workspace)) {
      bytes = room_for(id, window, *workspace);
      const CastLosses losses = fetch(id, window, *workspace, bytes);
      const bool is_refused = losses.num_too_large != 0 && plan_.on_overflow == OnOverflow::refuse;
      if (!piece.is_replica || is_refused) losses_.add(id.tensor_index, block, losses);
      if (is_refused) throw RefusedOverflow{};
      writer_.write_block(id, window.begin, bytes);
    }
    if (options_.progress) options_.progress(bytes.size());
    pool_.give_back(std::move(workspace));
  }

  /// Moves a block as the source stores it, if the source has its elements as one chunk and the
  /// writer takes it. Otherwise returns false. See [Note: Stored chunks].
  bool move_chunk(PieceId id, FlatRange window, Workspace& workspace) {
    const bool are_chunks_moved = chunk_source_ != nullptr && chunk_sink_ != nullptr &&
                                  is_copied(id) && chunk_sink_->takes_chunks(id);
    if (!are_chunks_moved) return false;
    const TensorCopy& copy = plan_.copies[id.tensor_index];
    const TensorEntry& tensor = source_.contents().tensors[copy.source_tensor];
    for (const std::uint32_t piece : copy.source_pieces[id.piece_index]) {
      std::optional<FlatRange> range;  // of the source piece, if it has the whole block in one run
      const CopyRuns runs(tensor.meta.shape, tensor.pieces[piece].region, source_region_of(id));
      runs.for_each_in(window, [&](const CopyRuns::Run& run) {
        if (run.numel == window.numel()) range = {run.source_begin, run.source_begin + run.numel};
      });
      if (!range) continue;
      const auto chunk = chunk_source_->read_chunk(copy.source_tensor, piece, *range,
                                                   writer_.block_numel(id), workspace.block);
      return chunk && chunk_sink_->write_chunk(id, window.begin, *chunk);
    }
    return false;
  }

  /// Returns the elements of a piece that are in a block.
  FlatRange window_of(const PieceBlocks& piece, std::int64_t block) const {
    const std::int64_t block_numel = writer_.block_numel(piece.id);
    const std::int64_t begin = (block - piece.first_block) * block_numel;
    return {begin, std::min(begin + block_numel, numel_of(region_of(piece.id)))};
  }

  std::span<std::byte> room_for(PieceId id, FlatRange window, Workspace& workspace) const {
    const auto numel = static_cast<std::uint64_t>(window.numel());
    return workspace.block.take(numel * itemsize(destination_of(id).meta.dtype));
  }

  /// Returns whether to read the source again for blocks that an interrupted run has written, to
  /// count numbers that were too large or became zero. If the move refuses too large numbers,
  /// written blocks have none.
  bool counts_kept_blocks(PieceId id) const {
    if (options_.reads_kept_blocks) return true;
    const DType from = source_dtype_of(id);
    const DType to = destination_of(id).meta.dtype;
    return (plan_.on_overflow != OnOverflow::refuse && can_overflow(from, to)) ||
           (options_.underflowed && can_underflow(from, to));
  }

  void note_unmoved(std::int64_t block) {
    const std::lock_guard lock(unmoved_mutex_);
    unmoved_blocks_.push_back(block);
  }

  /// When one block is refused, other threads stop within their blocks. Counts the too large
  /// numbers in the stopped blocks that come before the refused one, so that the error names the
  /// same tensor in every run.
  void count_unmoved_blocks() {
    const auto workspace = pool_.take();
    for (const std::int64_t block : unmoved_blocks_) {
      if (block >= losses_.first_block_too_large()) continue;
      const PieceBlocks piece = piece_with(block);
      const FlatRange window = window_of(piece, block);
      losses_.add(piece.id.tensor_index, block,
                  fetch(piece.id, window, *workspace, room_for(piece.id, window, *workspace)));
    }
  }

  /// Reads the whole tensor, and throws an error that counts all its numbers that are too large.
  [[noreturn]] void refuse_overflow(std::size_t tensor_index) {
    CastLosses losses;
    const auto workspace = pool_.take();
    for (std::size_t i = 0; i < order_.size(); ++i) {
      const PieceBlocks piece = blocks_of(i);
      if (piece.id.tensor_index != tensor_index || piece.is_replica) continue;
      const std::int64_t end = i + 1 < order_.size() ? blocks_of(i + 1).first_block : num_blocks_;
      for (std::int64_t block = piece.first_block; block < end; ++block) {
        throw_if_stopped();
        const FlatRange window = window_of(piece, block);
        losses.merge(fetch(piece.id, window, *workspace, room_for(piece.id, window, *workspace)));
      }
    }
    const std::size_t source_tensor = plan_.copies[tensor_index].source_tensor;
    throw overflow_error(options_.source_path, source_.contents().tensors[source_tensor].meta.fqn,
                         plan_.destination.tensors[tensor_index].meta.dtype, losses);
  }

  /// Reads the elements `window` of a destination piece from the source into `out`. Returns how
  /// many numbers a cast found too large or made zero.
  CastLosses fetch(PieceId id, FlatRange window, Workspace& workspace, std::span<std::byte> out) {
    const TensorCopy& copy = plan_.copies[id.tensor_index];
    const DType dtype = destination_of(id).meta.dtype;
    if (!copy.merged_widths.empty()) {
      const MergedRows rows{copy, id.piece_index, source_region_of(id), window, dtype};
      return merge_rows(source_, rows, {workspace.merge, workspace.window},
                        too_large_by(plan_.on_overflow), out);
    }
    const DType source_dtype = source_dtype_of(id);
    const bool is_cast = source_dtype != dtype;
    const auto numel = static_cast<std::uint64_t>(window.numel());
    const std::span<std::byte> gathered =
        is_cast ? workspace.uncast.take(numel * itemsize(source_dtype)) : out;
    Gatherer(source_, copy.source_tensor, workspace.window)
        .gather(copy.source_pieces[id.piece_index], source_region_of(id), window, gathered);
    if (!is_cast) return {};
    return cast_and_count(source_dtype, gathered, dtype, out, too_large_by(plan_.on_overflow));
  }

  const Plan& plan_;
  const TensorSource& source_;
  CheckpointWriter& writer_;
  InMemoryWriter* const memory_;                    // the writer, if its pieces are in memory
  const formats::ChunkSource* const chunk_source_;  // the source, if it gives chunks; else null
  formats::ChunkSink* const chunk_sink_;            // the writer, if it takes chunks; else null
  const ExecuteOptions& options_;
  const std::span<const PieceId> order_;    // of the writer's pieces
  std::vector<std::int64_t> first_blocks_;  // of each piece; empty while each piece has one block
  std::vector<bool> is_replica_;            // of each piece; empty if there are no replicas
  std::int64_t num_blocks_ = 0;
  std::uint64_t thread_nbytes_ = 1;
  WorkspacePool pool_;
  CastLossesByTensor losses_;
  std::mutex unmoved_mutex_;
  std::vector<std::int64_t> unmoved_blocks_;  // blocks that a failure interrupted
};

}  // namespace

void execute(const Plan& plan, const TensorSource& source, CheckpointWriter& writer,
             const ExecuteOptions& options) {
  TESSERA_CHECK(plan.problems.empty());
  try {
    Execution(plan, source, writer, options).run();
  } catch (...) {
    writer.abandon();
    throw;
  }
}

void execute_blocks(const Plan& plan, const TensorSource& source, CheckpointWriter& writer,
                    const ExecuteOptions& options, const std::vector<BlockRange>& blocks) {
  TESSERA_CHECK(plan.problems.empty());
  try {
    Execution(plan, source, writer, options).run(blocks);
  } catch (...) {
    writer.abandon();
    throw;
  }
}

std::vector<Value> prepare_move(const Plan& plan, const CheckpointReader& reader,
                                formats::CreateOptions& create,
                                const std::optional<FileStates>& source_files) {
  std::vector<Value> values;
  for (const std::size_t i : plan.value_sources) values.push_back(reader.read_value(i));
  if (create.journal) {
    create.journal->identity.merge(resume_identity(plan, reader, values, create, source_files));
  }
  return values;
}

namespace {

bool form_one_tree(const formats::CheckpointContents& contents) {
  try {
    formats::check_key_paths(contents, {});
  } catch (const Error&) {
    return false;
  }
  return true;
}

}  // namespace

std::optional<Error> clearer_refusal(const Error& error, const Plan& plan,
                                     const CheckpointReader& reader) {
  if (error.kind() == ErrorKind::invalid_argument && !form_one_tree(plan.destination)) {
    return Error(ErrorKind::mismatch, error.where(), error.reason(), error.remedy());
  }
  const auto& values = plan.destination.values;
  const auto refused = std::ranges::find(values, error.where().fqn, &formats::ValueEntry::name);
  if (error.kind() != ErrorKind::unsupported || error.remedy() || refused == values.end()) {
    return std::nullopt;
  }
  const auto source = plan.value_sources[static_cast<std::size_t>(refused - values.begin())];
  const std::string& name = reader.contents().values[source].name;
  return Error(error.kind(), error.where(), error.reason(),
               {Remedy::Action::leave_out, formats::pattern_of(reader.contents(), name)});
}

namespace {

/// Returns the one element of tensor number `t` of the destination, as the source has it.
formats::FormatWriter::Element read_element(const Plan& plan, const CheckpointReader& reader,
                                            std::size_t t) {
  const std::size_t source = plan.copies[t].source_tensor;
  const TensorEntry& tensor = reader.contents().tensors[source];
  const auto piece = std::ranges::find_if(
      tensor.pieces, [](const formats::Piece& each) { return numel_of(each.region) == 1; });
  TESSERA_CHECK(piece != tensor.pieces.end());
  formats::FormatWriter::Element element{tensor.meta.dtype,
                                         std::string(itemsize(tensor.meta.dtype), '\0')};
  reader.read_piece(source, static_cast<std::size_t>(piece - tensor.pieces.begin()), {0, 1},
                    std::as_writable_bytes(std::span(element.bytes)));
  return element;
}

/// Checks that all files that the plan needs can be read, by reading one element from each.
void check_source_files(const Plan& plan, const CheckpointReader& reader) {
  std::set<std::string> files;
  ByteBuffer element;
  for (const TensorCopy& copy : plan.copies) {
    const TensorEntry& tensor = reader.contents().tensors[copy.source_tensor];
    std::vector<bool> is_seen(tensor.pieces.size());
    for (const std::uint32_t piece : copy.source_pieces | std::views::join) {
      if (is_seen[piece]) continue;
      is_seen[piece] = true;
      if (!files.insert(reader.piece_storage(copy.source_tensor, piece).file).second) continue;
      reader.read_piece(copy.source_tensor, piece, {0, 1},
                        element.take(itemsize(tensor.meta.dtype)));
    }
  }
}

}  // namespace

void add_notes_of_writer(Plan& plan, const CheckpointReader& reader, const std::string& destination,
                         const formats::CreateOptions& create) {
  if (!plan.problems.empty()) return;
  const auto values = [&] {
    std::vector<Value> read;
    for (const std::size_t i : plan.value_sources) read.push_back(reader.read_value(i));
    return read;
  };
  const std::vector<formats::Finding> writer_notes = with_clearer_refusal(plan, reader, [&] {
    return formats::writer_of(create.format)
        .notes(destination, plan.destination, create, values,
               [&](std::size_t t) { return read_element(plan, reader, t); });
  });
  plan.notes.insert(plan.notes.end(), writer_notes.begin(), writer_notes.end());
}

void check_move(const Plan& plan, const CheckpointReader& reader, FileSystem& fs,
                const std::string& destination, formats::CreateOptions create,
                std::optional<int> num_shares, const std::optional<FileStates>& source_files) {
  const std::vector<Value> values = prepare_move(plan, reader, create, source_files);
  const formats::SharedWork work(fs, destination);
  if (num_shares && create.journal && work.is_begun()) {
    work.require_same(create.journal->identity, *num_shares);
  } else {
    with_clearer_refusal(plan, reader, [&] {
      formats::check_staging(fs, destination, plan.destination, values, create);
      formats::writer_of(create.format)
          .check_elements(destination, plan.destination, values, create,
                          [&](std::size_t t) { return read_element(plan, reader, t); });
    });
  }
  check_source_files(plan, reader);
}

std::unique_ptr<CheckpointWriter> start_move(const Plan& plan, const CheckpointReader& reader,
                                             FileSystem& fs, const std::string& destination,
                                             formats::CreateOptions create,
                                             const std::optional<FileStates>& source_files) {
  std::vector<Value> values = prepare_move(plan, reader, create, source_files);
  return with_clearer_refusal(plan, reader, [&] {
    return formats::writer_of(create.format)
        .start(fs, destination, formats::SharedContents::of(plan.destination), std::move(values),
               create);
  });
}

void require_unchanged(const FileStates& before, const FileStates& after) {
  for (const auto& [path, state] : before) {
    const auto now = after.find(path);
    const FileState found = now == after.end() ? FileState{"not there"} : now->second;
    if (is_same_state(path, state, found)) continue;
    throw Error::expected(ErrorKind::mismatch, {.path = path}, "source file",
                          "the file as it was when the move began: " + state.words,
                          change_in_words(state, found),
                          "did another program write it? move a checkpoint that is complete");
  }
}

void finish_move(const Plan& plan, const CheckpointReader& reader, CheckpointWriter& writer,
                 const ExecuteOptions& options) {
  ExecuteOptions with_path = options;
  with_path.source_path = reader.path();
  const FileStates before =
      options.source_files ? *options.source_files : source_file_states(reader);
  execute(plan, reader, writer, with_path);
  formats::check_rest(reader, {.stop = options.stop});
  require_unchanged(before, source_file_states(reader));
  if (options.stop.stop_requested()) throw Error(ErrorKind::interrupted, {}, "interrupted");
  writer.commit();
}

void move_checkpoint(const Plan& plan, const CheckpointReader& reader, FileSystem& fs,
                     const std::string& destination, const formats::CreateOptions& create,
                     const ExecuteOptions& options) {
  const auto writer = start_move(plan, reader, fs, destination, create, options.source_files);
  finish_move(plan, reader, *writer, options);
}

}  // namespace tessera::reshard
