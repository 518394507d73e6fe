#include "formats/torch_files/copies.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/cast.h"
#include "base/size_text.h"
#include "tessera/base/error.h"

namespace tessera::formats::torch_files {
namespace {

constexpr std::int64_t kMaxElementsCompared = std::int64_t{1} << 22;
constexpr std::int64_t kBeginNumel = 8192;  // of each run
constexpr std::int64_t kBlockNumel = std::int64_t{1} << 18;
constexpr const char* kDamaged = "they cannot be read (see verify)";
constexpr std::int64_t kWholeRuns = std::numeric_limits<std::int64_t>::max();

DType dtype_of(const Run& run) {
  return run.reader->contents().tensors[run.tensor].meta.dtype;
}

std::int64_t numel_of_runs(const std::vector<Run>& runs) {
  std::int64_t numel = 0;
  for (const Run& run : runs) numel += run.numel;
  return numel;
}

/// Reads elements of a run as elements of `dtype`.
std::vector<std::byte> elements(const Run& run, std::int64_t begin, std::int64_t numel,
                                DType dtype) {
  const auto count = static_cast<std::size_t>(numel);
  std::vector<std::byte> bytes(count * itemsize(dtype_of(run)));
  const FlatRange range{run.begin + begin, run.begin + begin + numel};
  run.reader->read_piece(run.tensor, 0, range, bytes);
  if (dtype_of(run) == dtype) return bytes;
  std::vector<std::byte> cast(count * itemsize(dtype));
  cast_elements(dtype_of(run), bytes, dtype, cast);
  return cast;
}

/// Reads elements of runs that follow each other.
std::vector<std::byte> elements(const std::vector<Run>& runs, std::int64_t begin,
                                std::int64_t numel, DType dtype) {
  std::vector<std::byte> bytes;
  for (const Run& run : runs) {
    const std::int64_t taken = std::min(run.numel - begin, numel);
    if (taken > 0) {
      const std::vector<std::byte> more = elements(run, begin, taken, dtype);
      bytes.insert(bytes.end(), more.begin(), more.end());
      numel -= taken;
      begin = 0;
    } else {
      begin -= run.numel;
    }
    if (numel == 0) break;
  }
  return bytes;
}

}  // namespace

bool are_equal(const Copy& copy, std::int64_t max_numel) {
  if (numel_of_runs(copy.read) != numel_of_runs(copy.left_out)) return false;
  if (copy.left_out.empty()) return true;
  const DType dtype = dtype_of(copy.left_out.front());
  std::int64_t begin_of_run = 0;
  for (const Run& run : copy.read) {
    if (!can_cast(dtype_of(run), dtype)) return false;
    const std::int64_t end = std::min(run.numel, max_numel);
    for (std::int64_t begin = 0; begin < end; begin += kBlockNumel) {
      const std::int64_t numel = std::min(end - begin, kBlockNumel);
      if (elements(run, begin, numel, dtype) !=
          elements(copy.left_out, begin_of_run + begin, numel, dtype)) {
        return false;
      }
    }
    begin_of_run += run.numel;
  }
  return true;
}

Copies::Result Copies::compared(const Copy& copy, std::int64_t max_numel) {
  try {
    return are_equal(copy, max_numel) ? Result::equal : Result::different;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::corruption) throw;
    return Result::not_known;
  }
}

std::vector<Finding> Copies::compare(const std::string& path) {
  std::int64_t left = kMaxElementsCompared;
  std::vector<std::string> changed;
  NamesByReason not_compared = std::move(not_compared_);
  std::vector<Copy> partly;
  for (Copy& copy : copies_) {
    const std::int64_t numel = numel_of_runs(copy.read);
    const bool is_whole = numel <= left;
    if (is_whole) left -= numel;
    const Result result = compared(copy, is_whole ? kWholeRuns : kBeginNumel);
    if (result == Result::different) {
      changed.push_back(copy.fqn);
    } else if (result == Result::not_known) {
      not_compared[kDamaged].push_back(copy.fqn);
    } else if (!is_whole) {
      partly.push_back(std::move(copy));
    }
  }
  copies_ = std::move(partly);
  std::vector<Finding> notes = notes_of(path, changed, not_compared);
  if (copies_.empty()) return notes;
  partial_ = "only the first " + std::to_string(kBeginNumel) +
             " elements of each rank compared, in " + counted(copies_.size(), "name") +
             ", such as '" + printable(copies_.front().fqn) + "'; verify compares all elements";
  notes.push_back(note(path, partial_));
  return notes;
}

std::uint64_t Copies::rest_nbytes() const {
  std::uint64_t nbytes = 0;
  for (const Copy& copy : copies_) {
    for (const Run& run : copy.read) {
      nbytes += static_cast<std::uint64_t>(run.numel) * itemsize(dtype_of(run));
    }
  }
  return nbytes;
}

std::vector<Finding> Copies::compare_rest(const std::string& path) const {
  std::vector<std::string> changed;
  NamesByReason not_compared;
  for (const Copy& copy : copies_) {
    const Result result = compared(copy, kWholeRuns);
    if (result == Result::different) changed.push_back(copy.fqn);
    if (result == Result::not_known) not_compared[kDamaged].push_back(copy.fqn);
  }
  return notes_of(path, changed, not_compared);
}

Finding Copies::note(const std::string& path, std::string found) const {
  return {.severity = Finding::Severity::note,
          .rule = rule_,
          .where = {.path = path},
          .expected = expected_,
          .found = std::move(found)};
}

std::vector<Finding> Copies::notes_of(const std::string& path,
                                      const std::vector<std::string>& changed,
                                      const NamesByReason& not_compared) const {
  std::vector<Finding> notes;
  if (!changed.empty()) {
    notes.push_back(note(path, counted(changed.size(), "name") +
                                   " with different numbers in the copies, such as '" +
                                   printable(changed.front()) + "'; " + advice_));
  }
  for (const auto& [reason, names] : not_compared) {
    notes.push_back(note(path, counted(names.size(), "name") +
                                   " whose copies were not compared, such as '" +
                                   printable(names.front()) + "': " + reason + "; " + advice_));
  }
  return notes;
}

}  // namespace tessera::formats::torch_files
