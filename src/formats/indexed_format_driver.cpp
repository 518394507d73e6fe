#include "formats/indexed_format_driver.h"

#include <algorithm>

#include "base/outside_failure.h"
#include "formats/staging/replaceable.h"
#include "object_store/files.h"
#include "tessera/base/error.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

std::vector<std::string> IndexedFormatDriver::own_files(const FileSystem& fs,
                                                        const std::string& directory,
                                                        const std::vector<std::string>& names,
                                                        const std::set<std::string>& opened) const {
  std::vector<std::string> own = FormatDriver::own_files(fs, directory, names, opened);
  std::set<std::string> named = opened;
  if (named.empty()) {
    try {
      const std::vector<std::string> paths = open(fs, directory)->data_files();
      named.insert(paths.begin(), paths.end());
    } catch (const Error& error) {
      if (tessera::detail::is_outside_failure(error)) throw;
      return own;
    }
  }
  std::erase_if(own, [&](const std::string& name) {
    const std::string path = join_path(directory, name);
    if (name == index_name() || named.contains(path)) return false;
    const auto object = object_store::find_name(path);
    const bool is_file = object && object->kind == object_store::NamedObject::Kind::file;
    return !is_file || object->nbytes != 0;
  });
  return own;
}

void IndexedFormatDriver::require_one_checkpoint(const FileSystem& fs, const std::string& directory,
                                                 const std::vector<std::string>& names,
                                                 const std::string& option) const {
  const std::vector<std::string> own = own_files(fs, directory, names, {});
  for (const std::string& name : names) {
    const bool is_of_another_save = may_own_file(name) && std::ranges::find(own, name) == own.end();
    if (is_of_another_save) refuse_foreign_file(directory, name, option);
  }
}

}  // namespace tessera::formats
