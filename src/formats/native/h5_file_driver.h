#pragma once

#include <hdf5.h>
#include <unistd.h>

#include <exception>
#include <memory>
#include <optional>
#include <string>

#include "tessera/base/byte_range.h"
#include "tessera/base/file_system.h"

namespace tessera::formats::native::h5 {

/// A file that HDF5 writes by way of Tessera's FileSystem: the library decides what lies where, and
/// every byte goes through a WritableFile. That makes each operation countable and its failure an
/// Error, and lets the bytes of chunks be written by someone else than the library.
/// Used by one thread at a time, except for the WritableFile.
class Channel {
 public:
  /// Creates the file at `path`; an empty one that exists is used.
  Channel(FileSystem& fs, const std::string& path);

  WritableFile& file() { return *file_; }

  /// From now on the library's writes lead nowhere, so that it can be rid of a file that has failed
  /// or is not wanted any more.
  void abandon() { abandoned_ = true; }

  /// Keeps the library from writing raw data, and takes note of where it would have.
  void start_placing() { placed_ = ByteRange{}; }
  /// Returns where the library wanted the raw data since `start_placing`, and lets it write again.
  ByteRange take_placed();

  /// Throws the error that the library's last failure came from, if it was one of input or output.
  static void rethrow_pending_error();
  static void forget_pending_error() noexcept;

 private:
  friend struct DriverFile;

  void write(H5FD_mem_t type, std::uint64_t offset, std::span<const std::byte> bytes);
  void read(std::uint64_t offset, std::span<std::byte> out);
  void resize(std::uint64_t nbytes);
  /// Says whether what the library wants is to be passed on. In a child process it is not: at its
  /// end the library closes what it finds open, and that is the parent's.
  bool leads_to_file() const { return !abandoned_ && ::getpid() == process_; }

  FileSystem& fs_;
  std::string path_;
  std::unique_ptr<WritableFile> file_;
  std::unique_ptr<ReadableFile> reader_;  // opened when the library reads back what it wrote
  std::uint64_t nbytes_ = 0;              // as far as the library knows
  bool abandoned_ = false;
  const pid_t process_ = ::getpid();
  std::optional<ByteRange> placed_;  // while placing
};

/// Makes `access_list` (of H5P_FILE_ACCESS) open its file by way of `channel`, which the library
/// keeps for as long as it keeps the file.
void set_channel(hid_t access_list, const std::shared_ptr<Channel>& channel);

}  // namespace tessera::formats::native::h5
