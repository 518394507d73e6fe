#include "inspect/pickle_scan/pickle_scan.h"

#include <algorithm>
#include <utility>

#include "inspect/pickle_scan/file_scan.h"
#include "tessera/base/error.h"

namespace tessera::inspect {
namespace {

class PathScan {
 public:
  PathScan(const FileSystem& fs, const PickleScanLimits& limits) : fs_(fs), limits_(limits) {}

  void scan(const std::string& path) {
    const auto kind = fs_.kind_of(path);
    if (kind == FileKind::directory) {
      root_ = fs_.resolve_links(path);
      return scan_folder(without_trailing_slashes(path), root_, 0);
    }
    if (kind != FileKind::regular) {
      throw Error::expected(ErrorKind::not_found, {.path = path}, "path", "a file or folder",
                            kind ? "a device, pipe or socket" : "nothing");
    }
    scan_file(path);
  }

  PickleScanReport take() { return report_.take(); }

 private:
  void scan_file(const std::string& path) {
    if (num_files_++ >= limits_.max_files) {
      if (num_files_ == limits_.max_files + 1) {
        not_looked_at(path, "at most " + std::to_string(limits_.max_files) + " files", "more");
      }
      return;
    }
    try {
      const auto file = fs_.open(path);
      FileScan(report_, limits_, *file).run();
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::interrupted) throw;
      not_looked_at(path, "a file that can be read", std::string(error.reason()));
    }
  }

  void scan_folder(const std::string& path, const std::string& resolved, int depth) {
    if (depth >= limits_.max_folders_deep) {
      return not_looked_at(
          path, "at most " + std::to_string(limits_.max_folders_deep) + " folders deep", "more");
    }
    std::vector<std::string> names;
    try {
      names = fs_.list_directory(path);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::interrupted) throw;
      return not_looked_at(path, "a folder that can be read", std::string(error.reason()));
    }
    for (const std::string& name : names) {
      scan_entry(join_path(path, name), join_path(resolved, name), depth);
    }
  }

  void scan_entry(const std::string& path, const std::string& resolved, int depth) {
    const auto kind = fs_.kind_of(path);
    const std::string target = kind ? fs_.resolve_links(path) : "";
    if (target != resolved) {
      const bool is_scanned = target.starts_with(root_ + "/");
      if (!is_scanned)
        not_looked_at(path, "a file or folder", "a link to a place outside of the scanned folder");
      return;
    }
    if (*kind == FileKind::directory) return scan_folder(path, resolved, depth + 1);
    if (*kind == FileKind::regular) return scan_file(path);
    not_looked_at(path, "a file or folder", "a device, pipe or socket");
  }

  void not_looked_at(const std::string& path, std::string expected, std::string found) {
    report_.add_problem({.kind = ScanProblem::Kind::not_looked_at,
                         .path = path,
                         .expected = std::move(expected),
                         .found = std::move(found)});
  }

  const FileSystem& fs_;
  const PickleScanLimits& limits_;
  std::string root_;  // absolute path, symbolic links resolved
  std::uint64_t num_files_ = 0;
  ReportBuilder report_;
};

}  // namespace

std::string ScannedName::in_words() const {
  if (module.empty()) return "extension " + name;
  return module + "." + name;
}

std::string_view to_string(ScanProblem::Kind kind) {
  switch (kind) {
    case ScanProblem::Kind::broken_pickle:
      return "broken pickle";
    case ScanProblem::Kind::archive:
      return "archive";
    case ScanProblem::Kind::not_looked_at:
      return "not looked at";
  }
  return "not looked at";
}

std::size_t PickleScanReport::count(Verdict verdict) const {
  return static_cast<std::size_t>(std::ranges::count(names, verdict, &ScannedName::verdict));
}

PickleScanReport scan_pickles(const FileSystem& fs, const std::vector<std::string>& paths,
                              const PickleScanLimits& limits) {
  PathScan scan(fs, limits);
  for (const std::string& path : paths) scan.scan(path);
  return scan.take();
}

}  // namespace tessera::inspect
