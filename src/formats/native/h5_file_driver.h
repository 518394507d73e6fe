#pragma once

#include <hdf5.h>
#include <unistd.h>

#include <exception>
#include <memory>
#include <optional>
#include <string>

#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::formats::native::h5 {

/// A file that HDF5 writes through Tessera's FileSystem: the library chooses the layout, and every
/// byte goes through a WritableFile. So each operation can be counted, each failure is an Error,
/// and Tessera can write the bytes of chunks itself. Only one thread at a time may use a Channel,
/// but any thread may use its WritableFile.
class Channel {
 public:
  /// Opens the file at `path` and keeps its contents. Creates the file if it is missing.
  Channel(FileSystem& fs, const std::string& path);

  WritableFile& file() { return *file_; }

  /// From now on, ignores all writes of the library, so that it can close a file that has failed or
  /// is no longer wanted.
  void abandon() { abandoned_ = true; }

  /// From now on, does not write raw data (elements) to the file, but records where the library
  /// would write this data.
  void start_placing() { placed_ = ByteRange{}; }
  /// Ends `start_placing`: later raw data reaches the file again. Returns the recorded place.
  ByteRange take_placed();

  /// If a read or write of this thread has failed (on any file), clears the error and throws it.
  static void rethrow_pending_error();
  static void forget_pending_error() noexcept;

 private:
  friend struct DriverFile;

  void write(H5FD_mem_t type, std::uint64_t offset, std::span<const std::byte> bytes);
  void read(std::uint64_t offset, std::span<std::byte> out);
  void resize(std::uint64_t nbytes);
  /// Says whether the library's reads and writes reach the file. In a child process they do not:
  /// when the child ends, the library closes all open files, but these belong to the parent.
  bool leads_to_file() const { return !abandoned_ && ::getpid() == process_; }

  FileSystem& fs_;
  std::string path_;
  std::unique_ptr<WritableFile> file_;
  std::unique_ptr<ReadableFile> reader_;  // opened when the library reads its data back
  std::uint64_t nbytes_ = 0;              // the file's size as the library knows it
  bool abandoned_ = false;
  const pid_t process_ = ::getpid();
  std::optional<ByteRange> placed_;  // set between start_placing and take_placed
};

/// Makes `access_list` (of H5P_FILE_ACCESS) open its file through `channel`. The `channel` variable
/// must live until the file is open: then the library copies it, and keeps it while it is open.
void set_channel(hid_t access_list, const std::shared_ptr<Channel>& channel);

}  // namespace tessera::formats::native::h5
