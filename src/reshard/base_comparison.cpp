#include "tessera/reshard/base_comparison.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>

#include "base/byte_buffer.h"
#include "tessera/base/error.h"

namespace tessera::reshard {
namespace {

using formats::BaseCheckpoint;
using formats::CheckpointContents;
using formats::PiecePair;

constexpr std::int64_t kComparedNbytes = std::int64_t{1} << 20;

/// Compares the pieces of a new checkpoint with the pieces of its base. Writes nothing.
class ComparingWriter final : public formats::CheckpointWriter {
 public:
  ComparingWriter(const CheckpointContents& contents, const BaseCheckpoint& base,
                  std::vector<PiecePair> pairs, RowChanges row_changes)
      : contents_(contents),
        base_(base),
        pairs_(std::move(pairs)),
        differs_(std::make_unique<std::atomic<bool>[]>(pairs_.size())) {
    for (const PiecePair& pair : pairs_) {
      order_.push_back(pair.piece);
      if (row_changes == RowChanges::write_piece) continue;
      const auto& tensor = contents_.tensors[pair.piece.tensor_index];
      const auto rows =
          formats::rows_to_patch(tensor.pieces[pair.piece.piece_index].region, tensor.meta);
      if (rows) candidates_.try_emplace(pair.piece, *rows);
    }
  }

  const CheckpointContents& contents() const override { return contents_; }
  std::span<const PieceId> write_order() const override { return order_; }
  std::int64_t block_numel(PieceId piece) const override {
    const std::int64_t numel = kComparedNbytes / static_cast<std::int64_t>(size_of(piece));
    const auto candidate = candidates_.find(piece);
    if (candidate == candidates_.end()) return numel;
    const std::int64_t row_numel = candidate->second.rows.row_numel;
    return std::max<std::int64_t>(numel / row_numel, 1) * row_numel;  // whole rows
  }

  /// Returns true, so that the caller skips the block, if an earlier block has shown that the piece
  /// differs from the base and must be written whole.
  bool resume_block(PieceId piece, std::int64_t /*begin*/, std::span<std::byte> /*room*/) override {
    return differs_[number_of(piece)].load(std::memory_order_relaxed);
  }
  void write_block(PieceId piece, std::int64_t begin, std::span<const std::byte> bytes) override {
    thread_local tessera::detail::ByteBuffer buffer;
    const std::size_t number = number_of(piece);
    const auto numel = static_cast<std::int64_t>(bytes.size() / size_of(piece));
    const auto [tensor_index, piece_index] = pairs_[number].base_piece;
    const std::span<std::byte> of_base = buffer.take(bytes.size());
    base_.read_unpatched({tensor_index, piece_index}, {begin, begin + numel}, of_base);
    if (std::memcmp(bytes.data(), of_base.data(), bytes.size()) == 0) return;
    const auto candidate = candidates_.find(piece);
    if (candidate == candidates_.end() || !note_rows(candidate->second, begin, bytes, of_base)) {
      differs_[number] = true;
    }
  }
  void abandon() noexcept override {}
  void commit() override {}

  formats::PieceMatches take_matches() {
    formats::PieceMatches matches;
    for (std::size_t i = 0; i < pairs_.size(); ++i) {
      if (differs_[i]) continue;
      matches.pairs.push_back(pairs_[i]);
      const auto candidate = candidates_.find(pairs_[i].piece);
      if (candidate == candidates_.end() || candidate->second.changed.count() == 0) continue;
      matches.changed_rows.emplace(pairs_[i].piece, std::move(candidate->second.changed));
    }
    return matches;
  }

 private:
  /// A piece that may be stored as a patch.
  struct Candidate {
    explicit Candidate(const formats::PieceRows& of_piece)
        : rows(of_piece), changed(of_piece.num_rows) {}

    const formats::PieceRows rows;
    std::mutex mutex;
    formats::RowSet changed;
  };

  /// Notes the rows of a block that differ. Returns false if too many rows of the piece differ.
  static bool note_rows(Candidate& candidate, std::int64_t begin, std::span<const std::byte> bytes,
                        std::span<const std::byte> of_base) {
    const std::uint64_t row_nbytes = candidate.rows.row_nbytes;
    const std::int64_t first = begin / candidate.rows.row_numel;
    const std::lock_guard lock(candidate.mutex);
    for (std::uint64_t at = 0; at < bytes.size(); at += row_nbytes) {
      if (std::memcmp(bytes.data() + at, of_base.data() + at, row_nbytes) == 0) continue;
      candidate.changed.insert(first + static_cast<std::int64_t>(at / row_nbytes));
    }
    return candidate.changed.count() <= candidate.rows.max_patch_rows();
  }

  std::size_t size_of(PieceId piece) const {
    return itemsize(contents_.tensors[piece.tensor_index].meta.dtype);
  }
  std::size_t number_of(PieceId piece) const {
    const auto found = std::ranges::lower_bound(pairs_, piece, {}, &PiecePair::piece);
    return static_cast<std::size_t>(found - pairs_.begin());
  }

  const CheckpointContents& contents_;
  const BaseCheckpoint& base_;
  const std::vector<PiecePair> pairs_;
  std::vector<PieceId> order_;
  /// One per pair: whether the piece is written whole because it differs.
  const std::unique_ptr<std::atomic<bool>[]> differs_;
  std::map<PieceId, Candidate> candidates_;
};

std::uint64_t nbytes_of_pieces(const CheckpointContents& contents,
                               std::span<const PiecePair> pairs) {
  std::uint64_t nbytes = 0;
  for (const PiecePair& pair : pairs) {
    const auto& tensor = contents.tensors[pair.piece.tensor_index];
    nbytes += nbytes_of(tensor.pieces[pair.piece.piece_index].region, tensor.meta.dtype);
  }
  return nbytes;
}

}  // namespace

formats::PieceMatches find_equal_pieces(const Plan& plan, const formats::TensorSource& source,
                                        const BaseCheckpoint& base, RowChanges row_changes,
                                        const ExecuteOptions& options, std::optional<int> rank) {
  std::vector<PiecePair> pairs = formats::pair_pieces(plan.destination, base.reader().contents());
  if (rank) {
    std::erase_if(pairs, [&](const PiecePair& pair) {
      const auto [tensor_index, piece_index] = pair.piece;
      return plan.destination.tensors[tensor_index].pieces[piece_index].rank != *rank;
    });
  }
  return find_equal_pieces_of(plan, source, base, std::move(pairs), row_changes, options);
}

formats::PieceMatches find_equal_pieces_of(const Plan& plan, const formats::TensorSource& source,
                                           const BaseCheckpoint& base, std::vector<PiecePair> pairs,
                                           RowChanges row_changes, const ExecuteOptions& options,
                                           const ComparisonBegins& begins) {
  if (pairs.empty()) return {};
  if (begins) begins(nbytes_of_pieces(plan.destination, pairs));
  ComparingWriter writer(plan.destination, base, std::move(pairs), row_changes);
  execute(plan, source, writer, options);
  return writer.take_matches();
}

std::shared_ptr<const BaseCheckpoint> open_base_of_move(const FileSystem& fs,
                                                        const std::string& base,
                                                        const std::string& destination,
                                                        const formats::CreateOptions& create) {
  auto opened = BaseCheckpoint::open(fs, without_trailing_slashes(base), create.format);
  formats::check_base(fs, base, destination);
  return opened;
}

void add_base_to_identity(const BaseCheckpoint& base, RowChanges row_changes,
                          formats::CreateOptions& create) {
  if (!create.journal) return;
  create.journal->identity["base"] = base.identity();
  if (row_changes == RowChanges::write_rows) create.journal->identity["changed-rows"] = "given";
}

std::uint64_t link_to_base(const Plan& plan, const formats::TensorSource& source,
                           const FileSystem& fs, const std::string& base,
                           const std::string& destination, RowChanges row_changes,
                           formats::CreateOptions& create, const ExecuteOptions& options,
                           const ComparisonBegins& begins) {
  if (base.empty()) return 0;
  auto opened = open_base_of_move(fs, base, destination, create);
  add_base_to_identity(*opened, row_changes, create);
  formats::PieceMatches matches = find_equal_pieces_of(
      plan, source, *opened, formats::pair_pieces(plan.destination, opened->reader().contents()),
      row_changes, options, begins);
  create.native.linked =
      formats::link_pieces(std::move(opened), plan.destination, std::move(matches));
  return create.native.linked ? create.native.linked->nbytes : 0;
}

std::uint64_t nbytes_to_move(const Plan& plan, const formats::CreateOptions& create) {
  std::uint64_t nbytes = plan.nbytes_to_write;
  if (!create.native.linked) return nbytes;
  const formats::LinkedPieces& linked = *create.native.linked;
  for (const PiecePair& pair : linked.pairs) {
    if (linked.changed_rows.contains(pair.piece)) continue;
    nbytes -= linked_nbytes_of(linked, plan.destination, pair.piece);
  }
  return nbytes;
}

}  // namespace tessera::reshard
