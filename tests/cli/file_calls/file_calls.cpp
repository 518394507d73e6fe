// Loaded before the C library (LD_PRELOAD), writes a line for each call that looks at, opens or
// lists a file by its path: the name of the call, a space and the path. The environment variable
// TESSERA_FILE_CALLS names the file that the lines are appended to. Two more variables make a test
// of what another program, or a disk, does at a certain moment:
//
//   TESSERA_SWAP_AT=END, TESSERA_SWAP=A:B   exchanges the paths A and B just before the first
//                                           opening of a path that ends with END
//   TESSERA_FAIL_AFTER=DST                  after a rename to DST, looks at DST and at paths that
//                                           begin with it, and their openings, fail (EIO)

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

namespace {

void record(const char* call, const char* path) {
  static const char* const log = std::getenv("TESSERA_FILE_CALLS");
  if (log == nullptr || std::strcmp(log, path) == 0) return;
  const auto fd = static_cast<int>(
      ::syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  const std::string line = std::string(call) + " " + path + "\n";
  if (fd < 0 || ::write(fd, line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
    std::abort();
  }
  ::close(fd);
}

std::string_view variable(const char* name) {
  const char* const text = std::getenv(name);
  return text == nullptr ? std::string_view() : std::string_view(text);
}

void swap_before_opening(std::string_view path) {
  static const std::string_view end = variable("TESSERA_SWAP_AT");
  static bool is_done = false;
  if (end.empty() || is_done || !path.ends_with(end)) return;
  is_done = true;
  const std::string_view paths = variable("TESSERA_SWAP");
  const std::string a(paths.substr(0, paths.find(':')));
  const std::string b(paths.substr(a.size() + 1));
  constexpr unsigned kExchange = 2;  // RENAME_EXCHANGE
  if (::syscall(SYS_renameat2, AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), kExchange) != 0) {
    std::abort();
  }
}

bool is_renamed = false;  // to the path in TESSERA_FAIL_AFTER

/// Returns whether a call for `path` must fail. Sets errno then.
bool fails(std::string_view path) {
  if (!is_renamed || !path.starts_with(variable("TESSERA_FAIL_AFTER"))) return false;
  errno = EIO;
  return true;
}

template <class Call>
Call* next(const char* name) {
  return reinterpret_cast<Call*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

int stat(const char* path, struct stat* status) noexcept {
  record("stat", path);
  if (fails(path)) return -1;
  static auto* const call = next<int(const char*, struct stat*)>("stat");
  return call(path, status);
}

int lstat(const char* path, struct stat* status) noexcept {
  record("lstat", path);
  if (fails(path)) return -1;
  static auto* const call = next<int(const char*, struct stat*)>("lstat");
  return call(path, status);
}

int open(const char* path, int flags, ...) {
  record("open", path);
  if (fails(path)) return -1;
  swap_before_opening(path);
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  static auto* const call = next<int(const char*, int, ...)>("open");
  return call(path, flags, mode);
}

int renameat2(int from_folder, const char* from, int to_folder, const char* to,
              unsigned flags) noexcept {
  static auto* const call = next<int(int, const char*, int, const char*, unsigned)>("renameat2");
  const int result = call(from_folder, from, to_folder, to, flags);
  if (result == 0 && variable("TESSERA_FAIL_AFTER") == to) is_renamed = true;
  return result;
}

DIR* opendir(const char* path) {
  record("opendir", path);
  static auto* const call = next<DIR*(const char*)>("opendir");
  return call(path);
}

char* realpath(const char* path, char* resolved) noexcept {
  record("realpath", path);
  static auto* const call = next<char*(const char*, char*)>("realpath");
  return call(path, resolved);
}

}  // extern "C"
