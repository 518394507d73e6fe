#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::test {

/// Wraps another reader. Counts the bytes that are read, and can make reads fail after a number of
/// bytes.
class CountingReader : public formats::CheckpointReader {
 public:
  explicit CountingReader(const formats::CheckpointReader& base) : base_(base) {}
  /// Makes each read fail with which more than `nbytes` further bytes would be read.
  void fail_after(std::uint64_t nbytes, ErrorKind kind = ErrorKind::io) {
    limit_nbytes_ = nbytes_read_ + nbytes;
    kind_ = kind;
  }
  std::uint64_t nbytes_read() const { return nbytes_read_; }
  void set_data_files(std::vector<std::string> paths) { data_files_ = std::move(paths); }

  formats::Format format() const override { return base_.format(); }
  const std::string& path() const override { return base_.path(); }
  const formats::CheckpointContents& contents() const override { return base_.contents(); }
  void read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                  std::span<std::byte> out) const override {
    if (nbytes_read_ + out.size() > limit_nbytes_) throw Error(kind_, {}, "pulled plug");
    nbytes_read_ += out.size();
    base_.read_piece(tensor_index, piece_index, range, out);
  }
  Value read_value(std::size_t value_index) const override { return base_.read_value(value_index); }
  std::vector<std::string> data_files() const override { return data_files_; }
  formats::PieceStorage piece_storage(std::size_t tensor_index,
                                      std::size_t piece_index) const override {
    return base_.piece_storage(tensor_index, piece_index);
  }
  void check_files(const formats::FindingSink&) const override {}
  void verify(const formats::FindingSink&, const formats::ProgressSink&, int) const override {}

 private:
  const formats::CheckpointReader& base_;
  std::uint64_t limit_nbytes_ = ~std::uint64_t{0};
  ErrorKind kind_ = ErrorKind::io;
  std::vector<std::string> data_files_;
  mutable std::atomic<std::uint64_t> nbytes_read_ = 0;
};

}  // namespace tessera::test
