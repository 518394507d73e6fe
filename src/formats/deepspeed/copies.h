#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "formats/deepspeed/files.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::deepspeed {

/// Elements of a tensor of a file, from `begin` on.
struct Run {
  const File* file;
  std::size_t tensor;
  std::int64_t begin = 0;
  std::int64_t numel = 0;
};

/// A tensor that is in the files twice, each time as several runs of elements, in order.
struct Copy {
  std::string fqn;
  std::vector<Run> read;      // what the checkpoint has
  std::vector<Run> left_out;  // in the same dtype
};

/// Whether the first `max_numel` elements of each run of `read` are also in `left_out`. Elements of
/// another dtype are compared as casts.
bool are_equal(const Copy& copy, std::int64_t max_numel);

/// Copies of tensors that a reader leaves out. They are compared with the tensors, so that a note
/// can name copies with other numbers. Of large copies, opening compares only
/// the beginnings, to be fast.
class Copies {
 public:
  /// `rule`, `expected`: of the notes. `advice`: what the note says after the name.
  Copies(std::string rule, std::string expected, std::string advice)
      : rule_(std::move(rule)), expected_(std::move(expected)), advice_(std::move(advice)) {}

  void add(Copy copy) { copies_.push_back(std::move(copy)); }
  /// Compares the copies. Returns the notes.
  std::vector<Finding> compare(const std::string& path);
  /// Compares the copies of which `compare` compared only a part, to the end. Returns the notes.
  std::vector<Finding> compare_rest(const std::string& path) const;
  /// Returns how many bytes of the checkpoint `compare_rest` compares.
  std::uint64_t rest_nbytes() const;
  /// Whether a note says that some were compared in part.
  bool is_about_rest(const Finding& finding) const {
    return !partial_.empty() && finding.found == partial_;
  }

 private:
  Finding note(const std::string& path, std::string found) const;
  std::string changed_in_words(const std::vector<std::string>& names) const;

  std::string rule_;
  std::string expected_;
  std::string advice_;
  std::vector<Copy> copies_;  // after `compare`: those to compare to their ends
  std::string partial_;       // what the note about them says; empty if there are none
};

}  // namespace tessera::formats::deepspeed
