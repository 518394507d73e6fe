#include "base/read_only_file_system.h"

#include "tessera/base/error.h"

namespace tessera {
namespace {

[[noreturn]] void refuse_to_write(const std::string& path) {
  throw Error(ErrorKind::io, {.path = path}, "cannot be written: this FileSystem is read-only");
}

}  // namespace

std::unique_ptr<WritableFile> ReadOnlyFileSystem::create(const std::string& path) {
  refuse_to_write(path);
}
std::unique_ptr<WritableFile> ReadOnlyFileSystem::open_for_update(const std::string& path) {
  refuse_to_write(path);
}
void ReadOnlyFileSystem::make_directory(const std::string& path) {
  refuse_to_write(path);
}
void ReadOnlyFileSystem::rename(const std::string& from, const std::string& /*to*/) {
  refuse_to_write(from);
}
void ReadOnlyFileSystem::exchange(const std::string& a, const std::string& /*b*/) {
  refuse_to_write(a);
}
void ReadOnlyFileSystem::remove_all(const std::string& path) {
  refuse_to_write(path);
}
void ReadOnlyFileSystem::sync_directory(const std::string& path) {
  refuse_to_write(path);
}

}  // namespace tessera
