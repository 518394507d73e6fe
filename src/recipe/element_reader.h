#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/byte_buffer.h"
#include "base/cast.h"
#include "recipe/block_tensor.h"
#include "reshard/piece_index.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::recipe {

/// The blocks of a tensor, sorted so that those with elements in a window (range of elements) are
/// found quickly.
class IndexedBlocks {
 public:
  explicit IndexedBlocks(BlockTensor tensor);

  const BlockTensor& tensor() const { return tensor_; }
  /// Calls `visit` for each block that may have elements in `[begin, end)` of the tensor's
  /// row-major order.
  template <class Visit>
  void for_each_in(FlatRange window, Visit visit) const {
    for (std::size_t i = first_in(window.begin); i < bounds_.size(); ++i) {
      if (bounds_[i].begin >= window.end) break;
      if (bounds_[i].end > window.begin) visit(tensor_.blocks[i]);
    }
  }

 private:
  std::size_t first_in(std::int64_t begin) const;

  BlockTensor tensor_;             // its blocks are sorted by their first element
  std::vector<FlatRange> bounds_;  // one per block: from its first element to its last
  std::int64_t longest_ = 0;
};

/// Reads elements of the tensors that a recipe makes ([Note: Blocks] in block_tensor.h) from the
/// pieces of the source. Uses at most 2 * `kScratchNbytes` of memory for each thread that reads.
/// Thread-safe. Keeps a reference to `source`.
class ElementReader {
 public:
  static constexpr std::uint64_t kScratchNbytes = std::uint64_t{4} << 20;

  /// `path`: of the source, for errors.
  ElementReader(const formats::TensorSource& source, std::string path);

  /// One share of a read. Several threads can each read one share. The elements of a share are near
  /// one another in the source.
  struct Share {
    int number = 0;
    int count = 1;
  };

  /// Fills `out` with the elements `window` of a tensor, in row-major order, or a share of them.
  void read(const IndexedBlocks& tensor, FlatRange window, std::span<std::byte> out,
            Share share) const;
  void read(const IndexedBlocks& tensor, FlatRange window, std::span<std::byte> out) const {
    read(tensor, window, out, {});
  }

  /// Returns whether a block of more than 64 KiB has elements in another order than the source, as
  /// after a transpose, or with gaps in between. The elements of a window are then far apart there.
  static bool is_permuted(const BlockTensor& tensor);

 private:
  /// A copy of elements that have constant strides both in the source and in the window.
  struct Copy {
    Shape sizes;
    Shape from;  // strides in the source
    Shape to;    // strides in the window
    std::int64_t source_offset = 0;
    std::int64_t target_offset = 0;
  };
  struct Work;

  static void simplify(Copy& copy);
  static bool narrow(Copy& copy, Share share);
  void read_copy(const Work& work, Copy copy) const;
  void read_inner(const Work& work, const Copy& inner) const;
  void require_finite(const Work& work, const CastLosses& losses) const;
  void check_sums(const Work& work, const Copy& inner) const;
  void fill(const Work& work, const Copy& copy) const;
  void read_source(const Work& work, FlatRange range, std::span<std::byte> out) const;

  class ScratchPool {
   public:
    std::unique_ptr<tessera::detail::ByteBuffer> take();
    void give_back(std::unique_ptr<tessera::detail::ByteBuffer> buffer);

   private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<tessera::detail::ByteBuffer>> free_;
  };

  const formats::TensorSource& source_;
  const std::string path_;
  /// One per tensor of the source; null for a tensor whose first piece is the whole tensor.
  std::vector<std::unique_ptr<reshard::PieceIndex>> pieces_;
  mutable ScratchPool pool_;
};

/// Returns the bytes of a number in a dtype; nothing if the dtype cannot represent it exactly. Also
/// returns nothing for NaN, for float8_e8m0fnu, and for a complex dtype unless the number is 0.
std::optional<std::vector<std::byte>> bytes_of_number(double number, DType dtype);

}  // namespace tessera::recipe
