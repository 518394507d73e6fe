#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <queue>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// The counts and names of a note that sums up several units (PartOfCheck explains units and
/// parts). If each part has such a note, `merge` makes one note of them.
struct CountedNote {
  enum class Kind : std::uint8_t { absent_crcs, foreign_names };
  static constexpr std::size_t kMaxNames = 1000;

  Kind kind;
  std::string path;
  std::uint64_t unit = 0;         // PartOfCheck::num_units when it was reported
  std::uint64_t num_members = 0;  // absent_crcs: members that were checked
  std::uint64_t num_without_crc = 0;
  /// foreign_names: the classes and functions that the pickles name. Another loader may look them
  /// up. At most kMaxNames, the first in byte order.
  std::set<std::string> names{};

  void add_name(std::string name);
  /// Adds what the note of another part has. Requires: the same kind, path and unit.
  void merge(const CountedNote& other);
  /// Returns the note; nothing if there is nothing to note.
  std::optional<Finding> finding() const;
};

/// Divides the check of a checkpoint among several processes. The check is a sequence of units: a
/// file, an archive, a member of an archive, or findings that were made on opening. Each unit
/// belongs to one part. Each process calls `takes` for all units, in the same order as the others,
/// and checks a unit if `takes` returns true. So no message is needed to divide the work.
/// Not thread-safe.
class PartOfCheck {
 public:
  /// The only part: takes all units.
  PartOfCheck() = default;
  /// Part `index` of `num_parts`. Requires: `0 <= index < num_parts`.
  PartOfCheck(int index, int num_parts);
  /// Like part `index`, but takes no unit: only adds up how many bytes the part would check.
  static PartOfCheck planned(int index, int num_parts);

  /// Begins the next unit, and returns whether this part checks it. The unit goes to the part with
  /// the fewest bytes so far. All that is reported before the next call belongs to the unit.
  /// `nbytes`: how much the unit's check reads; must not depend on findings in other units.
  bool takes(std::uint64_t nbytes);
  /// Takes a note that sums up several units. If this is the only part (default constructor),
  /// reports the note to `sink`. Otherwise keeps it for `notes`, even if it has counted nothing.
  void report(CountedNote note, const FindingSink& sink);
  /// Keeps the first `num_notes` notes, and drops all later ones.
  void drop_notes(std::size_t num_notes) {
    notes_.erase(notes_.begin() + static_cast<std::ptrdiff_t>(num_notes), notes_.end());
  }

  /// Returns how many units have begun.
  std::uint64_t num_units() const { return num_units_; }
  /// Returns how many bytes the units of this part have.
  std::uint64_t nbytes() const { return nbytes_; }
  const std::vector<CountedNote>& notes() const { return notes_; }

 private:
  using Load = std::pair<std::uint64_t, int>;  // bytes, index of the part

  int index_ = 0;
  bool is_only_planned_ = false;
  std::uint64_t num_units_ = 0;
  std::uint64_t nbytes_ = 0;
  std::priority_queue<Load, std::vector<Load>, std::greater<>> loads_{};  // empty: the only part
  std::vector<CountedNote> notes_{};
};

/// Interface of a reader whose check can be divided. Callers call the function `verify_part` below,
/// which accepts any reader: it checks a reader without this interface as one unit.
class DividedCheck {
 public:
  virtual ~DividedCheck() = default;
  /// Does what CheckpointReader::verify does, for the units that `part` takes. All parts together
  /// find what the whole check finds.
  virtual void verify_part(const FindingSink& sink, const ProgressSink& progress, int num_threads,
                           PartOfCheck& part) const = 0;
};

/// A reader with a divided check.
class DividedReader : public CheckpointReader, public DividedCheck {
 public:
  using CheckpointReader::verify;
  void verify(const FindingSink& sink, const ProgressSink& progress, int num_threads) const final {
    PartOfCheck whole;
    verify_part(sink, progress, num_threads, whole);
  }
};

/// Does `part` of the check of any reader, also of a reader without DividedCheck.
void verify_part(const CheckpointReader& reader, const FindingSink& sink,
                 const ProgressSink& progress, int num_threads, PartOfCheck& part);

}  // namespace tessera::formats
