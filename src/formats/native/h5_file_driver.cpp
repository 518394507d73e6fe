#include "formats/native/h5_file_driver.h"

#if H5_VERSION_GE(1, 13, 0)
#include <H5FDdevelop.h>
#endif

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::formats::native::h5 {
namespace {

constexpr herr_t kSuccess = 0;
constexpr herr_t kFailure = -1;

/// The value that `set_channel` puts into a property list. The library copies this struct byte by
/// byte, so it cannot hold a shared_ptr. It points to the caller's shared_ptr, which `open` reads.
struct DriverInfo {
  const std::shared_ptr<Channel>* channel;
};

// An exception must not pass through the library, which is C code. It is kept here until the
// library's call returns.
thread_local std::exception_ptr pending_error;

}  // namespace

/// The open file as the library knows it. The first member belongs to the library.
struct DriverFile {
  H5FD_t library_file{};
  std::shared_ptr<Channel> channel;
  haddr_t allocated_end = 0;

  static DriverFile& from(H5FD_t* file) { return *reinterpret_cast<DriverFile*>(file); }
  static const DriverFile& from(const H5FD_t* file) {
    return *reinterpret_cast<const DriverFile*>(file);
  }

  /// Does a read or a write for the library. Hides the failure of a write from the library, which
  /// would otherwise leave the file half closed and use freed memory when the process ends. The
  /// caller gets the error from `pending_error`.
  template <class Action>
  herr_t attempt(herr_t on_error, Action&& action) noexcept {
    try {
      action();
      return kSuccess;
    } catch (...) {
      pending_error = std::current_exception();
      channel->abandon();
      return on_error;
    }
  }

  static H5FD_t* open(const char* /*name*/, unsigned flags, hid_t access_list, haddr_t /*max*/) {
    // Before the library creates a file, it tries to open an existing one. That attempt is refused.
    const auto* info = static_cast<const DriverInfo*>(H5Pget_driver_info(access_list));
    if (info == nullptr || (flags & H5F_ACC_TRUNC) == 0) return nullptr;
    auto* file = new DriverFile;
    file->channel = *info->channel;
    return &file->library_file;
  }
  static herr_t close(H5FD_t* file) {
    delete &from(file);
    return kSuccess;
  }
  static int compare(const H5FD_t* a, const H5FD_t* b) {
    const Channel* first = from(a).channel.get();
    const Channel* second = from(b).channel.get();
    return first == second ? 0 : (std::less<>()(first, second) ? -1 : 1);
  }
  static herr_t query(const H5FD_t* /*file*/, unsigned long* flags) {
    *flags = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_ACCUMULATE_METADATA | H5FD_FEAT_DATA_SIEVE |
             H5FD_FEAT_AGGREGATE_SMALLDATA | H5FD_FEAT_DEFAULT_VFD_COMPATIBLE;
    return kSuccess;
  }
  static haddr_t get_allocated_end(const H5FD_t* file, H5FD_mem_t /*type*/) {
    return from(file).allocated_end;
  }
  static herr_t set_allocated_end(H5FD_t* file, H5FD_mem_t /*type*/, haddr_t address) {
    from(file).allocated_end = address;
    return kSuccess;
  }
  static haddr_t get_end(const H5FD_t* file, H5FD_mem_t /*type*/) {
    return from(file).channel->nbytes_;
  }
  static herr_t read(H5FD_t* file, H5FD_mem_t /*type*/, hid_t /*transfer_list*/, haddr_t address,
                     std::size_t nbytes, void* out) {
    DriverFile& self = from(file);
    return self.attempt(kFailure, [&] {
      self.channel->read(address, {static_cast<std::byte*>(out), nbytes});
    });
  }
  static herr_t write(H5FD_t* file, H5FD_mem_t type, hid_t /*transfer_list*/, haddr_t address,
                      std::size_t nbytes, const void* bytes) {
    DriverFile& self = from(file);
    return self.attempt(kSuccess, [&] {
      self.channel->write(type, address, {static_cast<const std::byte*>(bytes), nbytes});
    });
  }
  static herr_t truncate(H5FD_t* file, hid_t /*transfer_list*/, hbool_t /*closing*/) {
    DriverFile& self = from(file);
    return self.attempt(kSuccess, [&] { self.channel->resize(self.allocated_end); });
  }
};

namespace {

H5FD_class_t make_driver_class() {
  H5FD_class_t driver{};
#if H5_VERSION_GE(1, 13, 0)
  driver.version = H5FD_CLASS_VERSION;
  driver.value = static_cast<H5FD_class_value_t>(H5FD_VFD_RESERVED + 1);
#endif
  driver.name = "tessera";
  driver.maxaddr = (haddr_t{1} << 63) - 1;
  driver.fc_degree = H5F_CLOSE_STRONG;
  driver.fapl_size = sizeof(DriverInfo);
  driver.open = DriverFile::open;
  driver.close = DriverFile::close;
  driver.cmp = DriverFile::compare;
  driver.query = DriverFile::query;
  driver.get_eoa = DriverFile::get_allocated_end;
  driver.set_eoa = DriverFile::set_allocated_end;
  driver.get_eof = DriverFile::get_end;
  driver.read = DriverFile::read;
  driver.write = DriverFile::write;
  driver.truncate = DriverFile::truncate;
  constexpr H5FD_mem_t kMap[H5FD_MEM_NTYPES] = H5FD_FLMAP_DICHOTOMY;
  std::copy(std::begin(kMap), std::end(kMap), driver.fl_map);
  return driver;
}

}  // namespace

Channel::Channel(FileSystem& fs, const std::string& path)
    : fs_(fs), path_(path), file_(fs.kind_of(path) ? fs.open_for_update(path) : fs.create(path)) {}

ByteRange Channel::take_placed() {
  TESSERA_CHECK(placed_.has_value());
  return *std::exchange(placed_, std::nullopt);
}

void Channel::rethrow_pending_error() {
  if (pending_error) std::rethrow_exception(std::exchange(pending_error, nullptr));
}

void Channel::forget_pending_error() noexcept {
  pending_error = nullptr;
}

void Channel::write(H5FD_mem_t type, std::uint64_t offset, std::span<const std::byte> bytes) {
  nbytes_ = std::max(nbytes_, offset + bytes.size());
  if (placed_ && type == H5FD_MEM_DRAW) {
    TESSERA_CHECK(placed_->empty());
    placed_ = {offset, offset + bytes.size()};
    return;
  }
  if (leads_to_file()) file_->write_at(offset, bytes);
}

void Channel::read(std::uint64_t offset, std::span<std::byte> out) {
  if (leads_to_file() && (!reader_ || offset + out.size() > reader_->nbytes())) {
    reader_ = fs_.open(path_);
  }
  // Bytes that are not written yet read as zero.
  const std::uint64_t end = leads_to_file() ? reader_->nbytes() : 0;
  const auto there =
      static_cast<std::size_t>(std::min<std::uint64_t>(out.size(), end - std::min(end, offset)));
  if (there > 0) reader_->read_at(offset, out.first(there));
  std::ranges::fill(out.subspan(there), std::byte{0});
}

void Channel::resize(std::uint64_t nbytes) {
  if (leads_to_file()) file_->resize(nbytes);
  nbytes_ = nbytes;
}

void set_channel(hid_t access_list, const std::shared_ptr<Channel>& channel) {
  static const H5FD_class_t driver_class = make_driver_class();
  static const hid_t driver = H5FDregister(&driver_class);
  const DriverInfo info{&channel};
  if (driver < 0 || H5Pset_driver(access_list, driver, &info) < 0) {
    throw Error(ErrorKind::io, {}, "HDF5: H5Pset_driver: cannot set Tessera's file driver");
  }
}

}  // namespace tessera::formats::native::h5
