#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tessera::sim {

struct Stream;

/// A vector clock, as of one stream or of the host: for each stream (by number), how many of its
/// jobs are known to be done.
using Clock = std::map<int, std::uint64_t>;

/// Adds to `into` the jobs that `other` knows to be done.
void join(Clock& into, const Clock& other);

/// The accesses to a block of memory. Finds two accesses without a wait between them, at whatever
/// time the jobs run. Works like torch.cuda._sanitizer, but by byte range.
class AccessLog {
 public:
  struct Range {
    std::size_t begin, end;
  };
  enum class Kind { read, write };
  /// Adds an access of the job that `stream` launched last. Reports a race if it overlaps an
  /// earlier access that the stream does not know to be done, and one of the two is a write.
  /// Requires: streams().mutex is held.
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

// Thread-safe, whether or not the caller holds streams().mutex.
void report_race(std::string what);
void report_waiting_operator(int device, std::string name);
void forget_findings();

}  // namespace tessera::sim
