#include "tessera/reshard/base_comparison.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <utility>

#include "base/byte_buffer.h"
#include "object_store/url.h"
#include "tessera/base/error.h"

namespace tessera::reshard {
namespace {

using formats::BaseCheckpoint;
using formats::CheckpointContents;
using formats::PiecePair;

constexpr std::int64_t kBlockNbytes = std::int64_t{1} << 20;

/// Compares the pieces of a new checkpoint with the pieces of its base. Writes nothing.
class ComparingWriter final : public formats::CheckpointWriter {
 public:
  ComparingWriter(const CheckpointContents& contents, const BaseCheckpoint& base,
                  std::vector<PiecePair> pairs)
      : contents_(contents),
        base_(base),
        pairs_(std::move(pairs)),
        differs_(std::make_unique<std::atomic<bool>[]>(pairs_.size())) {
    for (const PiecePair& pair : pairs_) order_.push_back(pair.piece);
  }

  const CheckpointContents& contents() const override { return contents_; }
  std::span<const PieceId> write_order() const override { return order_; }
  std::int64_t block_numel(PieceId piece) const override {
    return kBlockNbytes / static_cast<std::int64_t>(size_of(piece));
  }

  /// Returns true, so that the block is skipped, if an earlier block of the piece differs from the
  /// base.
  bool resume_block(PieceId piece, std::int64_t /*begin*/, std::span<std::byte> /*room*/) override {
    return differs_[number_of(piece)].load(std::memory_order_relaxed);
  }
  void write_block(PieceId piece, std::int64_t begin, std::span<const std::byte> bytes) override {
    thread_local tessera::detail::ByteBuffer buffer;
    const std::size_t number = number_of(piece);
    const auto numel = static_cast<std::int64_t>(bytes.size() / size_of(piece));
    const auto [tensor_index, piece_index] = pairs_[number].base_piece;
    const std::span<std::byte> of_base = buffer.take(bytes.size());
    base_.reader().read_piece(tensor_index, piece_index, {begin, begin + numel}, of_base);
    if (std::memcmp(bytes.data(), of_base.data(), bytes.size()) != 0) differs_[number] = true;
  }
  void abandon() noexcept override {}
  void commit() override {}

  std::vector<PiecePair> equal_pairs() const {
    std::vector<PiecePair> equal;
    for (std::size_t i = 0; i < pairs_.size(); ++i) {
      if (!differs_[i]) equal.push_back(pairs_[i]);
    }
    return equal;
  }

 private:
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
  const std::unique_ptr<std::atomic<bool>[]> differs_;  // one per pair: whether the pieces differ
};

}  // namespace

std::vector<PiecePair> find_equal_pieces(const Plan& plan, const formats::TensorSource& source,
                                         const BaseCheckpoint& base, const ExecuteOptions& options,
                                         std::optional<int> rank) {
  std::vector<PiecePair> pairs = formats::pair_pieces(plan.destination, base.reader().contents());
  if (rank) {
    std::erase_if(pairs, [&](const PiecePair& pair) {
      const auto [tensor_index, piece_index] = pair.piece;
      return plan.destination.tensors[tensor_index].pieces[piece_index].rank != *rank;
    });
  }
  return find_equal_pieces_of(plan, source, base, std::move(pairs), options);
}

std::vector<PiecePair> find_equal_pieces_of(const Plan& plan, const formats::TensorSource& source,
                                            const BaseCheckpoint& base,
                                            std::vector<PiecePair> pairs,
                                            const ExecuteOptions& options) {
  ComparingWriter writer(plan.destination, base, std::move(pairs));
  if (writer.write_order().empty()) return {};
  execute(plan, source, writer, options);
  return writer.equal_pairs();
}

std::shared_ptr<const BaseCheckpoint> open_base_of_move(const FileSystem& fs,
                                                        const std::string& base,
                                                        const std::string& destination,
                                                        const formats::CreateOptions& create) {
  if (object_store::is_url(base)) {
    throw Error::expected(ErrorKind::unsupported, {.path = base}, "base", "a local path", "a URL",
                          "hard links need the file system of the destination");
  }
  auto opened = BaseCheckpoint::open(fs, without_trailing_slashes(base), create.format);
  formats::check_base(fs, base, destination);
  return opened;
}

std::uint64_t link_to_base(const Plan& plan, const formats::TensorSource& source,
                           const FileSystem& fs, const std::string& base,
                           const std::string& destination, formats::CreateOptions& create,
                           const ExecuteOptions& options) {
  if (base.empty()) return 0;
  auto opened = open_base_of_move(fs, base, destination, create);
  std::vector<PiecePair> equal = find_equal_pieces(plan, source, *opened, options);
  create.native.linked =
      formats::link_pieces(std::move(opened), plan.destination, std::move(equal));
  return create.native.linked ? create.native.linked->nbytes : 0;
}

}  // namespace tessera::reshard
