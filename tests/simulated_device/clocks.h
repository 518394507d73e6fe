#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tessera::sim {

struct Stream;

/// A vector clock: for each stream, by number, how many of its jobs are known to be done.
using Clock = std::map<int, std::uint64_t>;

/// Adds what `other` knows.
void join(Clock& into, const Clock& other);

/// The accesses to a block of memory, to find two that no wait puts in order. Does not depend on
/// when jobs run. As torch.cuda._sanitizer, but by byte range.
class AccessLog {
 public:
  struct Range {
    std::size_t begin, end;
  };
  enum class Kind { read, write };
  /// Notes an access of the job that `stream` launched last, and reports a race if an earlier
  /// access is not known to be done. Requires: streams().mutex is held.
  void note(const Stream& stream, Range range, Kind kind, const std::string& name);
  void clear() { accesses_.clear(); }

 private:
  struct Access {
    const Stream* stream;
    std::uint64_t number;
    Range range;
    Kind kind;
    std::string name;
  };
  std::vector<Access> accesses_;
};

// Findings may come from any thread, with or without streams().mutex.
void report_race(std::string what);
void report_waiting_operator(int device, std::string name);
void forget_findings();

}  // namespace tessera::sim
