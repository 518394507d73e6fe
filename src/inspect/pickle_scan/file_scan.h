#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "inspect/pickle_scan/inflate.h"
#include "inspect/pickle_scan/pickle_scan.h"
#include "inspect/pickle_scan/pickle_walk.h"
#include "inspect/pickle_scan/zip_entries.h"

namespace tessera::inspect {

/// Collects the findings of a scan into a report, at most kMaxProblems problems. Imports of one
/// name with the same verdict and reason become one entry.
class ReportBuilder {
 public:
  void add_file() { ++report_.num_files; }
  std::uint64_t num_pickles() const { return report_.num_pickles; }
  /// `packaged`: the modules whose Python source is in the same archive (torch.package).
  void add_pickle(const PickleWalk& walk, const ScannedPlace& place,
                  const std::set<std::string>& packaged);
  void add_problem(ScanProblem problem);
  /// Returns the report, with the names sorted.
  PickleScanReport take();

 private:
  static constexpr std::size_t kMaxProblems = 10'000;

  using Key = std::tuple<Verdict, std::string, std::string, std::string>;  // module, name, reason
  std::map<Key, ScannedName> names_;
  PickleScanReport report_;
};

/// Finds the pickles in one file, and adds what they import to a report. A file can be several
/// things at once, such as a pickle with a zip archive after it. The scan looks at each.
class FileScan {
 public:
  FileScan(ReportBuilder& report, const PickleScanLimits& limits, const ReadableFile& file);
  /// Throws: Error(io).
  void run();

 private:
  /// `pickle`: the bytes must be a pickle. `anything`: the bytes may be a pickle or other data.
  enum class Expect { pickle, anything };

  void scan(const ReadableFile& file, const std::string& member, int depth);
  /// Scans the members of a zip archive. Returns whether the file is one, without faults.
  bool scan_zip(const ReadableFile& file, const std::string& member, int depth);
  /// Looks for pickles from `end` on, where the archives in the file end, and reports other bytes.
  void scan_behind_zip(const ReadableFile& file, std::uint64_t end, const std::string& member);
  /// Reports the Python source in an archive of torch.package, and returns its modules.
  std::set<std::string> packaged_modules(const std::vector<ZipEntry>& entries,
                                         const std::string& member);
  void scan_zip_entry(const ReadableFile& file, const ZipEntry& entry, const std::string& member,
                      int depth);
  void scan_tar(const ReadableFile& file, const std::string& member, int depth);
  /// Inflates a gzip or zlib file and scans its content. Reports another compression as not looked
  /// at, unless the member may be a raw tensor. Returns false if it has found no compression.
  bool scan_compressed(const ReadableFile& file, const std::string& member, int depth);
  void scan_inflated(const ReadableFile& file, Wrapping wrapping, const std::string& member,
                     int depth, std::uint32_t crc = 0);
  void scan_member(const ReadableFile& data, std::uint32_t crc, const std::string& member,
                   int depth);
  /// Scans what follows each other in a file: pickles, streams of torch.save with their storages,
  /// NumPy arrays. Reports bytes behind them as not looked at. `is_zip`: the members of a zip
  /// archive in the file have been scanned.
  void scan_in_a_row(const ReadableFile& file, const std::string& member, Expect expect,
                     bool is_zip);
  /// Scans the array at `begin`, and the pickles of its objects. Returns where it ends; nothing if
  /// that is not known.
  std::optional<std::uint64_t> scan_numpy(const ReadableFile& file, std::uint64_t begin,
                                          const std::string& member);
  struct PickleRow {
    std::uint64_t end = 0;  // of the last pickle; without pickles: where the row would begin
    bool has_stop = true;   // false: the last pickle is broken, so nothing is known behind it
  };
  /// Scans pickles in a row from `begin` on, up to an array or a stream of torch.save behind them.
  PickleRow scan_pickles_at(const ReadableFile& file, std::uint64_t begin,
                            const std::string& member, Expect expect);
  bool add_pickle(const ReadableFile& file, std::uint64_t begin, const std::string& member,
                  Expect expect, std::uint64_t& end);
  void add_faults(const std::vector<ArchiveFault>& faults, const std::string& member);
  void not_looked_at(const std::string& member, std::string expected, std::string found);
  bool spend(const std::string& member, std::uint64_t nbytes);

  ReportBuilder& report_;
  const PickleScanLimits& limits_;
  const ReadableFile& file_;
  std::uint64_t budget_nbytes_;  // how many bytes the scan may still read
  bool is_budget_spent_ = false;
  std::set<std::string> packaged_;  // the modules in the archive of torch.package being scanned
};

}  // namespace tessera::inspect
