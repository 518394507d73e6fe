#include "formats/other_formats.h"

#include <algorithm>
#include <iterator>

#include "base/word_list.h"
#include "tessera/base/file_system.h"

namespace tessera::formats {
namespace {

/// Returns the name of a file of a format, for a message: the file that marks a checkpoint of this
/// format, or else the first file that the format may own.
std::string file_of(const FormatDriver& driver, const FileSystem& fs,
                    const DirectoryListing& directory) {
  std::string mark(driver.description().in_directory);
  if (directory.has(mark)) return mark;
  const auto found = std::ranges::find_if(
      directory.names, [&](const std::string& name) { return driver.may_own_file(name); });
  if (found != directory.names.end()) return *found;
  const std::vector<std::string> own = driver.own_files(fs, directory.path, directory.names, {});
  return own.empty() ? mark : own.front();
}

FormatInDirectory describe(const FormatDriver& driver, const FileSystem& fs,
                           const DirectoryListing& directory, const Recognition& recognition) {
  return {&driver, file_of(driver, fs, directory), !recognition.refusal};
}

}  // namespace

std::string FormatInDirectory::in_words() const {
  std::string words = printable(file) + " (" + std::string(driver->format().name());
  if (!is_complete) words += ", without " + std::string(driver->description().in_directory);
  return words + ")";
}

std::vector<FormatInDirectory> other_formats_in(const FileSystem& fs,
                                                const DirectoryListing& directory,
                                                const FormatDriver& known,
                                                const std::set<std::string>& opened) {
  const std::vector<std::string> own = known.own_files(fs, directory.path, directory.names, opened);
  std::vector<std::string> rest;  // without `known`'s files: other formats may have their names too
  std::ranges::copy_if(directory.names, std::back_inserter(rest), [&](const std::string& name) {
    return std::ranges::find(own, name) == own.end();
  });
  const DirectoryListing without_own{directory.path, rest};
  std::vector<FormatInDirectory> others;
  for (const FormatDriver* driver : format_drivers()) {
    if (driver == &known) continue;
    const Recognition recognition = driver->recognize_directory(without_own);
    if (recognition.match < Match::by_name) continue;
    others.push_back(describe(*driver, fs, without_own, recognition));
  }
  return others;
}

std::optional<Error> refusal_of_mixture(const FileSystem& fs, const DirectoryListing& directory,
                                        const FormatDriver& known) {
  const Recognition recognition = known.recognize_directory(directory);
  if (!recognition.refusal) return std::nullopt;
  const std::vector<FormatInDirectory> others = other_formats_in(fs, directory, known, {});
  if (others.empty()) return std::nullopt;
  std::vector<std::string> found{describe(known, fs, directory, recognition).in_words()};
  for (const FormatInDirectory& other : others) found.push_back(other.in_words());
  return Error::expected(recognition.refusal->kind(), {.path = directory.path}, "directory",
                         "the files of one checkpoint", tessera::detail::list_of(found),
                         "move the files of other formats to another folder");
}

std::optional<Finding> note_of_other_formats(const FileSystem& fs, const CheckpointReader& reader) {
  const std::string& path = reader.path();
  if (fs.kind_of(path) != FileKind::directory) return std::nullopt;
  const std::vector<std::string> names = fs.list_directory(path);
  const std::vector<std::string> data_files = reader.data_files();
  const std::vector<FormatInDirectory> others = other_formats_in(
      fs, {path, names}, driver_of(reader.format()), {data_files.begin(), data_files.end()});
  if (others.empty()) return std::nullopt;
  std::vector<std::string> found;
  for (const FormatInDirectory& other : others) found.push_back(other.in_words());
  return Finding{.severity = Finding::Severity::note,
                 .rule = "directory",
                 .where = {.path = path},
                 .expected = "only files of the format " + std::string(reader.format().name()),
                 .found = "also " + tessera::detail::list_of(found) + ", not read"};
}

}  // namespace tessera::formats
