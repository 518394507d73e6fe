#pragma once

#include <cstddef>
#include <iterator>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/base/file_system.h"

namespace tessera::formats::pickle {

/// The bytes of a pickle, at addresses that do not change. They are in memory, or in a file, which
/// is read in parts as the bytes are needed. So a pickle that is larger than the objects it makes
/// does not need memory for all its bytes. Not thread-safe.
class PickleBytes {
 public:
  PickleBytes() = default;
  PickleBytes(std::vector<char> bytes)
      : in_memory_(std::move(bytes)),
        data_(in_memory_.data()),
        nbytes_(in_memory_.size()),
        loaded_end_(nbytes_) {}
  /// A copy of the bytes.
  template <std::forward_iterator Iterator>
  PickleBytes(Iterator begin, Iterator end) : PickleBytes(std::vector<char>(begin, end)) {}
  /// The bytes of the whole file; does not read them yet. `file` must outlive all calls of the
  /// functions that are not const, because these read it.
  explicit PickleBytes(const ReadableFile& file);

  std::size_t size() const { return nbytes_; }
  /// The bytes. Only those that were loaded and not released may be read.
  const char* data() const { return data_; }

  bool is_loaded() const { return loaded_end_ == nbytes_; }
  /// Loads all bytes before `end`. Requires: `end <= size()`. Throws: what ReadableFile::read_at
  /// throws.
  void load(std::size_t end) {
    if (end > loaded_end_) read_to(end);
  }
  /// Returns where the first `byte` from `begin` on is, if anywhere. Loads the bytes up to there.
  std::optional<std::size_t> find(char byte, std::size_t begin);

  /// Frees the memory of the bytes `[begin, end)`, which the caller will not read again. Frees only
  /// whole memory pages within this range. Returns the end of the freed bytes, from which on the
  /// next call can go on. Does nothing, and returns `begin`, if the bytes do not come from a file.
  std::size_t release(std::size_t begin, std::size_t end);
  /// Forgets the bytes of a file from `begin` on. The next `load` reads them again.
  void unload(std::size_t begin);

 private:
  void read_to(std::size_t end);

  std::vector<char> in_memory_;
  const ReadableFile* file_ = nullptr;
  std::unique_ptr<char[]> from_file_;  // has memory only for pages that were written to
  const char* data_ = nullptr;
  std::size_t nbytes_ = 0;
  std::size_t loaded_end_ = 0;
};

/// Keeps copies of texts in few blocks of memory. Returned views stay valid while the store lives,
/// also if it is moved.
class TextStore {
 public:
  std::string_view add(std::string_view text);

 private:
  std::vector<std::unique_ptr<char[]>> blocks_;
  std::size_t free_nbytes_ = 0;  // at the end of the last block
  char* free_ = nullptr;
};

}  // namespace tessera::formats::pickle
