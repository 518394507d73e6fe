#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/file_system.h"

namespace tessera::inspect {

/// What a class or function that a pickle names can do to a program that loads the pickle. Sorted
/// by danger.
enum class Verdict : std::uint8_t {
  known,      // torch.load(weights_only=True) allows it, or DCP's metadata needs it
  plain,      // makes data of the standard library, NumPy or torch, without effects
  opaque,     // comes from another package, whose code the scan does not know
  dangerous,  // can run code or reach the system
};

/// Returns the enumerator's name.
std::string_view to_string(Verdict verdict);

/// Where a pickle imports a name.
struct ScannedPlace {
  std::string path{};        // of the file
  std::string member{};      // of an archive: `archive/data.pkl`; empty: the file itself
  std::uint64_t offset = 0;  // of the opcode, within the member or the file. Units: bytes
};

/// A class or function that pickles import.
struct ScannedName {
  static constexpr std::size_t kMaxPlaces = 100;

  Verdict verdict = Verdict::opaque;
  std::string module{};
  std::string name{};                  // `system` in `os.system`; `Outer.Inner` for a nested class
  std::string reason{};                // why the name is dangerous, in words; empty if it is not
  bool is_called = false;              // a pickle calls it, or makes an object of it
  std::uint64_t num_times = 0;         // how often it is imported
  std::vector<ScannedPlace> places{};  // at most kMaxPlaces: the first in each pickle

  /// Returns the dotted name, such as `os.system`; `extension N` if only a code is known.
  std::string in_words() const;
};

/// A reason why the scan of a file is incomplete, or a sign that the file was manipulated.
struct ScanProblem {
  enum class Kind : std::uint8_t {
    broken_pickle,  // loaders stop here with an error, after they have run the opcodes before
    archive,        // parts of an archive contradict each other
    not_looked_at,  // because of a limit, a compression, a link, or an unreadable file
  };
  Kind kind = Kind::not_looked_at;
  std::string path{};
  std::string member{};
  std::optional<std::uint64_t> offset{};
  std::string expected{};
  std::string found{};
};

/// Returns `broken pickle`, `archive` or `not looked at`.
std::string_view to_string(ScanProblem::Kind kind);

/// What a scan found.
struct PickleScanReport {
  std::vector<ScannedName> names{};     // the worst first, then by name
  std::vector<ScanProblem> problems{};  // in the order of the files
  std::uint64_t num_files = 0;          // files that were looked at
  std::uint64_t num_pickles = 0;

  /// Returns how many names have the verdict.
  std::size_t count(Verdict verdict) const;
  /// Says whether no name is dangerous and there are no problems.
  bool is_clean() const { return count(Verdict::dangerous) == 0 && problems.empty(); }
};

/// Limits of a scan, because a hostile file could make it take forever. If a limit stops the scan
/// of something, the report has a problem that says so.
struct PickleScanLimits {
  std::uint64_t max_inflated_nbytes = std::uint64_t{64} << 20;  // of one compressed member
  std::uint64_t max_files = 1'000'000;
  int max_folders_deep = 64;
};

/// Finds the pickles in files and folders, and what each would import and call when Python loads
/// it. Runs and imports nothing. Looks into zip archives (also damaged ones), tars, NumPy files and
/// compressed files. Reads several pickles in a row in one file. Continues after a problem.
/// Searches folders and all folders below them, but follows no links there; a link that leads out
/// of the folder is a problem. Throws: Error(not_found) if a path is neither a file nor a folder.
PickleScanReport scan_pickles(const FileSystem& fs, const std::vector<std::string>& paths,
                              const PickleScanLimits& limits = {});

}  // namespace tessera::inspect
