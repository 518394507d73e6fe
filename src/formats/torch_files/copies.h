#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tessera/formats/checkpoint.h"

namespace tessera::formats::torch_files {

/// `numel` consecutive elements of a tensor that is one piece, starting with element `begin`.
struct Run {
  const CheckpointReader* reader;  // of one file, or the reader that compares copies
  std::size_t tensor;
  std::int64_t begin = 0;
  std::int64_t numel = 0;
};

/// A tensor whose elements are in the files twice. `read` and `left_out` list the runs of the two
/// copies, in the order of the tensor's elements.
struct Copy {
  std::string fqn;
  std::vector<Run> read;      // the copy that the reader returns as the tensor
  std::vector<Run> left_out;  // the copy that the reader leaves out; its runs have one dtype
};

/// Returns whether both copies have the same numel, and the first `max_numel` elements of each run
/// of `copy.read` equal the elements at the same positions of `copy.left_out`. If dtypes differ, it
/// first casts the elements of `read` to the dtype of `left_out`; false if that is not possible.
bool are_equal(const Copy& copy, std::int64_t max_numel);

/// Compares the copies that a reader leaves out with the tensors that it reads, and makes notes of
/// those that differ. To open fast, `compare` reads whole copies up to 2^22 elements in all, and of
/// others only the first 8192 elements of each run. `verify` compares the rest.
class Copies {
 public:
  /// `rule` and `expected`: these members of each note (`Finding`). `advice`: the end of each
  /// note's text. It says which of the two copies is read.
  Copies(std::string rule, std::string expected, std::string advice)
      : rule_(std::move(rule)), expected_(std::move(expected)), advice_(std::move(advice)) {}

  /// Replaces the end of each note's text.
  void set_advice(std::string advice) { advice_ = std::move(advice); }
  void add(Copy copy) { copies_.push_back(std::move(copy)); }
  /// Adds a name whose copies are not compared. A note says so, with the reason.
  void add_not_compared(std::string fqn, const std::string& reason) {
    not_compared_[reason].push_back(std::move(fqn));
  }
  /// Compares the copies. Returns the notes.
  std::vector<Finding> compare(const std::string& path);
  /// Compares all elements of the copies that `compare` found equal in part. Returns the notes.
  std::vector<Finding> compare_rest(const std::string& path) const;
  /// Returns the bytes of the tensors that `compare_rest` compares, not counting their copies.
  std::uint64_t rest_nbytes() const;
  /// Returns whether `finding` is the note that some copies were compared only in part.
  bool is_about_rest(const Finding& finding) const {
    return !partial_.empty() && finding.found == partial_;
  }

 private:
  enum class Result { equal, different, not_known };
  using NamesByReason = std::map<std::string, std::vector<std::string>>;

  /// Returns `not_known` if a copy cannot be read because its file is damaged.
  static Result compared(const Copy& copy, std::int64_t max_numel);
  Finding note(const std::string& path, std::string found) const;
  /// Returns the notes about copies that differ, and about those that were not compared.
  std::vector<Finding> notes_of(const std::string& path, const std::vector<std::string>& changed,
                                const NamesByReason& not_compared) const;

  std::string rule_;
  std::string expected_;
  std::string advice_;
  NamesByReason not_compared_;  // from `add_not_compared`
  std::vector<Copy> copies_;    // after `compare`: the copies that it found equal, but only in part
  std::string partial_;         // the note about these copies; empty if there are none
};

}  // namespace tessera::formats::torch_files
