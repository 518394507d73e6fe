// Loaded before the C library (LD_PRELOAD), writes a line for each call that looks at, opens or
// lists a file by its path: the name of the call, a space and the path. The environment variable
// TESSERA_FILE_CALLS names the file that the lines are appended to.

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <string>

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

template <class Call>
Call* next(const char* name) {
  return reinterpret_cast<Call*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

int stat(const char* path, struct stat* status) noexcept {
  record("stat", path);
  static auto* const call = next<int(const char*, struct stat*)>("stat");
  return call(path, status);
}

int lstat(const char* path, struct stat* status) noexcept {
  record("lstat", path);
  static auto* const call = next<int(const char*, struct stat*)>("lstat");
  return call(path, status);
}

int open(const char* path, int flags, ...) {
  record("open", path);
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  static auto* const call = next<int(const char*, int, ...)>("open");
  return call(path, flags, mode);
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
